"""Finds what is wrong with a hand-written Levanter trainer section, and its smallest repair."""
