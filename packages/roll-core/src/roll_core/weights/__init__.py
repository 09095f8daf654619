"""Weights, as used by the runtime and strategies: digests, fp8 rows, shared device memory, sizes."""
