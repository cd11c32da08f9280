"""Write models in the Hugging Face, Levanter and Orbax formats, complete or not at all."""
