"""Attention of a decoder's layers, and the positions that it turns queries and keys by."""
