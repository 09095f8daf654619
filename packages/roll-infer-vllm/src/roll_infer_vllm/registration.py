"""What vLLM calls in each of its processes (entry point `vllm.general_plugins`), before it loads a model there."""

from __future__ import annotations

from roll_infer_vllm.lifeline import end_with_owner

TRANSFER = "roll"
"""Name of the weight transfer engine in vLLM's registry."""


def register() -> None:
    """Tie the process to the worker, and name the weight transfer engine, whose module is imported where an engine asks
    for it, and the quantisation method. May be called again."""
    end_with_owner()
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    try:
        WeightTransferEngineFactory.register_engine(TRANSFER, "roll_infer_vllm.transfer", "BucketTransfer")
    except ValueError as error:
        if "already registered" not in str(error):
            raise
    import roll_infer_vllm.eight_bits  # noqa: F401 - its decorators register
