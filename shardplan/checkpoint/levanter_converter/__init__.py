"""The drop-in for Levanter's converter: its side that saves."""
