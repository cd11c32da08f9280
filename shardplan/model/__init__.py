"""From a Hugging Face config.json to a model of Levanter's kind, and to its logical axes."""
