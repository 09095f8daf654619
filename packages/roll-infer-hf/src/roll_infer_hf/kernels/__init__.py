"""Compiled decoding kernels of the embedded engine, for CPUs and NVIDIA GPUs."""
