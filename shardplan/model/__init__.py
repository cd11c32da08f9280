"""From a Hugging Face config.json to the logical axes of the Levanter model."""
