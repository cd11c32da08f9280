"""What a mapping costs: how arrays are sharded, which collectives follow, time and memory of a step."""
