"""Engines with vLLM's second model runner (V2) on a CPU, by Triton's interpreter: tens of tokens per second."""

from __future__ import annotations

import os
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

FOLDER = Path(__file__).parent / "interpreted"


@contextmanager
def second_runner():
    """Engines started meanwhile have the second model runner. vLLM is imported, and used by this process as well."""
    import vllm.config.vllm
    import vllm.triton_utils

    path = os.pathsep.join([str(FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])])
    variables = {"PYTHONPATH": path, "TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
    with ExitStack() as patches:
        patches.enter_context(mock.patch.dict(os.environ, variables))
        for module in (vllm.config.vllm, vllm.triton_utils):
            patches.enter_context(mock.patch.object(module, "HAS_TRITON", True))
        yield
