"""How SGLang runs without kernels: plain torch, step by step, and stand-ins for what is there for CUDA alone."""

from __future__ import annotations

import os
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest

import shared_tests

ON_A_CPU = {
    "attention_backend": "torch_native",
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "max_total_tokens": 8192,
    "max_running_requests": 64,
    "mem_fraction_static": 0.3,
}
"""`strategy_config`."""
STAND_INS = [str(Path(__file__).parent / "cpu"), str(Path(shared_tests.__file__).parents[1] / "stand_ins")]


@contextmanager
def stood_in(**variables):
    """Processes that are started meanwhile find the stand-ins before all else, and these environment variables.

    Triton's kernels run in its interpreter: SGLang has no others for gates of shared experts.
    """
    path = os.pathsep.join(filter(None, [*STAND_INS, os.environ.get("PYTHONPATH")]))
    with patch.dict(os.environ, {"PYTHONPATH": path, "TRITON_INTERPRET": "1", **variables}):
        yield


def need_image_processors():
    """Skip the test if transformers loads image processors only beside torchvision, as the one of SGLang 0.5.20."""
    import transformers

    if "torchvision" in getattr(transformers.AutoImageProcessor, "_backends", ()):
        pytest.skip(f"transformers {transformers.__version__} loads image processors only beside torchvision")
