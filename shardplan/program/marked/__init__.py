"""What a trace marks as one operation: attention, also a sparse one, and blocks of routed experts, with their kinds."""
