"""Embedded inference engine for Hugging Face models on PyTorch (`hf_infer`)."""
