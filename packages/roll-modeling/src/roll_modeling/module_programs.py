"""Module programs for strategies that wrap a torch module: models of a library, and the module as programs see it.

    ModuleBatch -> program(StrategyModule, batch) -> tensors, or a loss -> backward

Shapes: B rows of a batch.
"""

from __future__ import annotations

import pkgutil
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from roll_core.errors import ModelError, UnsupportedError
from roll_core.spec.module_program import ModelLibrary
from roll_modeling.model import moved

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from roll_core.spec.model import ModelSpec


def model_library(spec: ModelSpec) -> ModelLibrary | None:
    """Create the library of `spec.library`; None for models of transformers.

    Raises `ModelError` if it cannot be imported or is no `ModelLibrary`.
    """
    if not spec.library:
        return None
    try:
        library: Any = pkgutil.resolve_name(spec.library)
    except (ImportError, AttributeError, ValueError) as error:
        raise ModelError(f"library {spec.library!r} cannot be imported: {error}; expected 'module:class'") from error
    if not (isinstance(library, type) and issubclass(library, ModelLibrary)):
        raise ModelError(f"library {spec.library!r} is not a subclass of {ModelLibrary.__module__}.ModelLibrary")
    return library()


def load_module(library: ModelLibrary, spec: ModelSpec, *, device: str = "cpu") -> nn.Module:
    """Load the model of `spec` by its library, in evaluation mode on `device`. Raises `ModelError`."""
    module = library.load(spec)
    if not isinstance(module, nn.Module):
        raise ModelError(f"library {spec.library!r}: load returned {type(module).__name__}, expected a torch module")
    return moved(module, device).eval()


class StrategyModule:
    """The `ProgramModule` of a strategy."""

    def __init__(
        self,
        forward: Callable[..., Any],
        *,
        device: torch.device | str,
        dtype: torch.dtype,
        base: Callable[[], AbstractContextManager[None]] | None = None,
        average: Callable[[], AbstractContextManager[None]] | None = None,
    ) -> None:
        """`forward` is the module, or an engine's wrapper of it; `dtype` is the compute dtype.

        Within `base()` the module computes without adapters, within `average()` with the moving average. Both must
        restore the parameters bit for bit, without autograd's notice: a loss may enter them between the forward pass
        and the backward pass. None: the role has no adapters, or no average.
        """
        self._forward, self._dtype = forward, dtype
        self._contexts = {"base": base, "average": average}
        self._active: set[str] = set()
        self._device = torch.device(device)

    @property
    def device(self) -> torch.device:
        """Device of inputs and outputs."""
        return self._device

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward pass, with inputs `[B, ...]` of floating point in the compute dtype."""
        from torch.utils._pytree import tree_map

        args, kwargs = tree_map(self._cast, (args, kwargs))
        return self._forward(*args, **kwargs)

    def _cast(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.ndim > 1:
            return value.to(self._dtype)
        return value

    def base(self) -> AbstractContextManager[None]:
        """Compute without adapters and gradients. Raises `UnsupportedError` without adapters."""
        return self._within("base", "the role has no adapters (model_args.lora_target), so it has no base model")

    def average(self) -> AbstractContextManager[None]:
        """Compute with the moving average and without gradients. Raises `UnsupportedError` without one."""
        return self._within("average", "the role keeps no moving average of its parameters (ema_decay)")

    @contextmanager
    def _within(self, name: str, missing: str) -> Iterator[None]:
        """Enter a context once; nested entries change nothing."""
        context = self._contexts[name]
        if context is None:
            raise UnsupportedError(missing)
        if name in self._active:
            with torch.no_grad():
                yield
            return
        self._active.add(name)
        try:
            with torch.no_grad(), context():
                yield
        finally:
            self._active.discard(name)
