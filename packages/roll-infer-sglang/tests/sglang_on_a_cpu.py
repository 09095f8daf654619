"""How SGLang runs without kernels: plain torch, step by step, and stand-ins for what is there for CUDA alone."""

from __future__ import annotations

import os
from contextlib import contextmanager
from pathlib import Path

ON_A_CPU = {
    "attention_backend": "torch_native",
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "max_total_tokens": 8192,
    "max_running_requests": 64,
    "mem_fraction_static": 0.3,
}
"""`strategy_config`."""
STAND_INS = str(Path(__file__).parent / "cpu")


@contextmanager
def stood_in():
    """Processes that are started meanwhile find the stand-ins before all else."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [STAND_INS, before]))
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
