"""C++ and CUDA sources of a package: compiled on first use, or into its wheel."""
