"""CUDA's rule under `torch.use_deterministic_algorithms(True)`, for tensors of the host."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

REFUSED = ("histc", "kthvalue", "median", "nanmedian", "put_")
"""Operators without a deterministic CUDA kernel; `cumsum` of floats and `bincount` with weights are others."""


class _CudaRule(TorchFunctionMode):
    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.__name__, kwargs or {}
        refused = name in REFUSED or (name == "cumsum" and (kwargs.get("dtype") or args[0].dtype).is_floating_point)
        weighted = name == "bincount" and (kwargs.get("weights") is not None or len(args) > 1)
        if torch.are_deterministic_algorithms_enabled() and (refused or weighted):
            raise RuntimeError(
                f"{name}_cuda does not have a deterministic implementation, but you set"
                " 'torch.use_deterministic_algorithms(True)'. You can turn off determinism …"
            )
        return func(*args, **kwargs)


@contextmanager
def deterministic_cuda() -> Iterator[None]:
    """Request deterministic kernels; operators that CUDA refuses then raise, on this thread."""
    usual = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        with _CudaRule():
            yield
    finally:
        torch.use_deterministic_algorithms(usual)


def cuda_rule() -> TorchFunctionMode:
    """The rule alone: for code that requests deterministic kernels itself."""
    return _CudaRule()
