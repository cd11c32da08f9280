"""What a trace marks as one operation: attention and blocks of routed experts, each with its kind."""
