"""Conversion between Hugging Face's and Megatron's weights: names, fused tensors and shards."""
