"""Engines with vLLM's second model runner (V2) on a CPU, by Triton's interpreter: tens of tokens per second."""

from __future__ import annotations

import os
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

FOLDER = Path(__file__).parent / "interpreted"


def second_runner_variables():
    """Environment variables that give the engine of a process, or of a worker of Ray, the second model runner."""
    path = os.pathsep.join([str(FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {"PYTHONPATH": path, "TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}


@contextmanager
def second_runner():
    """Engines started meanwhile have the second model runner. vLLM is imported, and used by this process as well."""
    import vllm.config.vllm
    import vllm.triton_utils
    import vllm.v1.sample.ops.topk_topp_sampler  # under the patches its import needs Triton

    with ExitStack() as patches:
        patches.enter_context(mock.patch.dict(os.environ, second_runner_variables()))
        for module in (vllm.config.vllm, vllm.triton_utils):
            patches.enter_context(mock.patch.object(module, "HAS_TRITON", True))
        yield
