"""Evaluate a streamed model on text: loss per token, perplexity, bits per byte."""
