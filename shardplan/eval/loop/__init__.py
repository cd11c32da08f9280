"""The steps of an evaluation: inputs are made ahead, and results are fetched while the devices compute."""
