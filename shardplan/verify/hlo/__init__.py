"""The compiled module as text: instructions, collectives, buffers, and a time modelled from them."""
