"""The dtype of each parameter: as requested, as its module requires, or as the checkpoint stores it."""
