"""Imports vLLM once for all forked processes: its engine then starts in seconds. Importing this module is enough.

The engine's core is forked from the worker (`ENVIRONMENT` in test_models.py), and classes of models are inspected in
the worker. On an accelerator neither is possible.
"""

from __future__ import annotations

import vllm.entrypoints.openai.api_server
import vllm.v1.engine.async_llm
import vllm.v1.engine.core
import vllm.v1.worker.cpu_worker  # noqa: F401
from vllm.model_executor.models import registry

registry._run_in_subprocess = lambda function: function()
