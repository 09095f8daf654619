"""What vLLM calls in each of its processes (entry point `vllm.general_plugins`), so that it knows our part by name."""

from __future__ import annotations

TRANSFER = "roll"
"""Name of the weight transfer engine in vLLM's registry."""


def register() -> None:
    """Name the weight transfer engine; its module is imported where an engine asks for it. May be called again."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    try:
        WeightTransferEngineFactory.register_engine(TRANSFER, "roll_infer_vllm.transfer", "BucketTransfer")
    except ValueError as error:
        if "already registered" not in str(error):
            raise
