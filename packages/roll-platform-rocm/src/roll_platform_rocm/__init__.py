"""ROLL's platform for AMD GPUs."""
