"""The orders in which a sequence is sharded over a ring of devices. Imports no NumPy, because Plans name the orders."""

from enum import StrEnum


class SequenceOrder(StrEnum):
    """The order of positions in an array that is sharded over a ring of devices."""

    CONTIGUOUS = "contiguous"
    ZIGZAG = "zigzag"
    STRIPED = "striped"
    DOCUMENTS = "documents"
