"""Hugging Face models on PyTorch: the built-in train strategy and the embedded inference engine."""
