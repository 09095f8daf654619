"""Faster operations on a host: compiled kernels, oneDNN's products, attention in blocks; and the means to compile them.

Optional: strategies, engines and transports use torch's operations where this package is not installed.
"""
