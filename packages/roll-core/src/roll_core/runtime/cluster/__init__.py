"""Where workers run: executors, placement, leases of slots, Python environments, facts of a host."""
