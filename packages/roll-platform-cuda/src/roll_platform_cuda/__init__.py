"""ROLL's platform for NVIDIA GPUs."""
