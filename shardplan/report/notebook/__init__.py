"""Displays results in Python: as text when printed, as a picture in a notebook."""
