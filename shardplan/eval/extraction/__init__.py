"""Extraction: the probability that a model gives to the words of texts, window by window."""
