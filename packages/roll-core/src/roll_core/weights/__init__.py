"""What the runtime and strategies share about weights: digests, fp8 rows, memory of a device, sizes."""
