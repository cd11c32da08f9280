"""What each command does with its configuration: one file a command. Outside, only `__main__` imports them."""
