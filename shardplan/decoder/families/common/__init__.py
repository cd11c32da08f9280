"""What families share: functions that read keys of a config.json, and functions that return rules of parameters."""
