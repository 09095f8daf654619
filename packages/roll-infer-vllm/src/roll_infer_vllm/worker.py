"""Methods that the worker calls in each of vLLM's processes through `collective_rpc`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roll_modeling.engine_weights import Action


class WorkerExtension:
    """Extension of vLLM's worker class (`worker_extension_cls`): vLLM adds it as a base, so `self` is a vLLM worker."""

    model_runner: Any
    weight_transfer_engine: Any
    device: Any

    def roll_prepare(self, never_sampled: Sequence[int]) -> None:
        """Install our sampler, which never samples these ids, and mend pipeline stages. Called once after the model is
        loaded."""
        from roll_infer_vllm.workarounds import allocate_stage_inputs, use_tempered_sampler

        use_tempered_sampler(self.model_runner, never_sampled)
        allocate_stage_inputs(self.model_runner)

    def roll_act(self, action: Action, argument: Any) -> Any:
        """Run an action of `LoadedModel.act` on this process's model."""
        from roll_infer_vllm.loaded_model import VllmModel

        return VllmModel(self.model_runner.get_model(), str(self.device)).act(action, argument)

    def roll_load_failure(self) -> str:
        """Reason why this process failed to load a bucket of the update; empty if it loaded all of them."""
        failure: str = self.weight_transfer_engine.failure
        return failure

    def roll_release_cache(self) -> None:
        """On a CPU: return the memory pages of the KV cache to the operating system; its content is lost."""
        from roll_modeling.offload import release_pages

        for cache in self.model_runner.kv_caches:
            release_pages(cache)
