"""Building blocks of train strategies and engines that wrap a Hugging Face module.

Loading, flat attention, chunked logprobs, adapters. Plugins may import this package, like the algorithms.
"""
