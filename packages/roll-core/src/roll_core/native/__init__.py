"""C++ and CUDA sources of a package, compiled on first use or when its wheel is built."""
