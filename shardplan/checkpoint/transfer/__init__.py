"""Transfers stored tensors to devices: the schedule of reads, the reads, the collectives, the placement of shards."""
