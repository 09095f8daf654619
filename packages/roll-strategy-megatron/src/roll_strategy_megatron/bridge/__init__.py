"""Hugging Face models and Megatron's: the same numbers under other names, joined and cut in other ways."""
