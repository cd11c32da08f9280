"""LoRA adapters that PEFT has saved: what they change, and the tensors that they make of those of a checkpoint."""
