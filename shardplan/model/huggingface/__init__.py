"""The config.json of a Hugging Face model: which models are supported, and what each of its keys means."""
