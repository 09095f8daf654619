"""What train strategies that wrap a Hugging Face module share: loading, flat attention, logprobs chunk by chunk,
adapters.

Plugins may import it, as they may import the algorithms.
"""
