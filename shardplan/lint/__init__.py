"""What is wrong with a hand-written layout, and the smallest repair."""
