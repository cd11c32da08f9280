"""Corrects Levanter's models where they differ from the Hugging Face models of the same name."""
