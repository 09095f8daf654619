"""Imports vLLM once for all forked processes: its engine then starts in seconds. Importing this module is enough.

The engine's core is forked from the worker, and classes of models are inspected in the worker. On an accelerator
neither is possible.
"""

from __future__ import annotations

import multiprocessing

import vllm.entrypoints.openai.api_server
import vllm.v1.engine.async_llm
import vllm.v1.engine.core
import vllm.v1.worker.cpu_worker  # noqa: F401
from vllm.model_executor.models import registry
from vllm.v1.engine import utils

registry._run_in_subprocess = lambda function: function()
utils.get_mp_context = lambda: multiprocessing.get_context("fork")  # vLLM always spawns it on a CPU
