"""Names that megatron-core imports, and what it calls without fp8."""

import contextlib


class CudaRNGStatesTracker:
    """Megatron's own is used."""


@contextlib.contextmanager
def activation_recompute_forward(activation_recompute=False, recompute_phase=False):
    yield
