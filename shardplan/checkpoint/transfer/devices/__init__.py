"""The part of a transfer on devices: exchange rows, decode codes, and write boxes into the shards."""
