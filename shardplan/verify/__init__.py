"""What the TPU compiler says of a plan, on a machine without a TPU."""
