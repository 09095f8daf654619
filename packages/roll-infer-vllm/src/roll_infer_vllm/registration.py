"""vLLM plugin (entry point `vllm.general_plugins`); vLLM calls `register` in each process before it loads a model."""

from __future__ import annotations

from roll_infer_vllm.watchdog import exit_with_parent

TRANSFER = "roll"
"""Name of our weight transfer engine in vLLM's registry."""


def register() -> None:
    """Register the weight transfer engine and the quantization method, and end the process when the worker exits. Mend
    vLLM's encoders, activations and JetMoE, and on a CPU its mixtures of experts and rotary embeddings.

    The weight transfer module is imported only when an engine uses it. Idempotent.
    """
    exit_with_parent()
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    try:
        WeightTransferEngineFactory.register_engine(TRANSFER, "roll_infer_vllm.transfer", "BucketTransfer")
    except ValueError as error:
        if "already registered" not in str(error):
            raise
    from vllm.platforms import current_platform

    import roll_infer_vllm.fp8  # noqa: F401 - its decorators register
    from roll_infer_vllm.images import use_image_processor_of_run

    use_image_processor_of_run()
    from roll_infer_vllm import workarounds

    workarounds.load_flat_encoders()
    workarounds.store_activations_in_dtype_of_model()
    workarounds.repeat_keys_for_experts()
    if current_platform.is_cpu():
        workarounds.route_with_correction_biases()
        workarounds.rotate_every_head()
        workarounds.skip_experts_of_other_ranks()
        workarounds.exchange_uneven_parts()
