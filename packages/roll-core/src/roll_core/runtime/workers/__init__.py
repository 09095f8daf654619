"""What runs in a worker: one rank of a role, around the strategy that a plugin brings."""
