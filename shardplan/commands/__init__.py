"""What each command does with its configuration: one file a command. Nothing imports this package."""
