"""How results show themselves to Python: as text where they are printed, as a picture in a notebook."""
