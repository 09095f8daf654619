"""Where workers run: executors, placement, slot leases, Python environments, host information."""
