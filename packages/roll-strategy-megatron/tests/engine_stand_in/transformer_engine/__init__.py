"""Stands for NVIDIA's Transformer Engine, which runs on CUDA only: the modules that megatron-core's wrappers derive
from, in plain torch, with the collectives and the parameters of the real ones. Written from their documentation and
from what the wrappers ask of them; arguments that nothing here asks for are refused."""

from transformer_engine import common, pytorch

__version__ = "2.10.0"
__all__ = ["common", "pytorch"]
