"""Extraction: how probable a model finds the words of texts, window by window."""
