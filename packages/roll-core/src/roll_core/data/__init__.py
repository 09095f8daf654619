"""Datasets, chat templates, tokenizers and packing."""
