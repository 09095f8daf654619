"""Flow models of diffusers: their families, their sizes, and the library that loads and writes them."""
