"""Datasets, chat templates, tokenizers, packing."""
