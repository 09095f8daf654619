"""Weight transports between processes: device memory, shared memory, broadcasts, and files."""
