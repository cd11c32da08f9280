"""LoRA adapters that PEFT has saved, and their merge into the tensors of a checkpoint."""
