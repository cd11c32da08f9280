"""Moving bytes from files to devices: schedule, reading, exchange between devices, placement."""
