"""Compiled kernels of the embedded engine on a CPU."""
