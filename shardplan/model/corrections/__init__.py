"""Corrects what Levanter's models compute differently from the Hugging Face models of the same name."""
