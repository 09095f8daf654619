"""ROLL's platform for GPUs of NVIDIA."""
