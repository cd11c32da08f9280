"""What each command does with its configuration: one file a command. Of the rest, only `shardplan.__main__` imports them."""
