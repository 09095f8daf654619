"""A run, from a checked config to a complete record: the loop, its roles, checkpoints, signals."""
