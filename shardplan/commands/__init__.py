"""What each command does with its configuration, one file a command; only `shardplan.__main__` imports them."""
