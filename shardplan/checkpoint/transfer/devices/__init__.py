"""The part of a transfer on devices: exchange of rows, codes made numbers, and boxes written into the shards."""
