"""The steps of an evaluation: makes inputs ahead, and fetches results while the devices compute."""
