"""Methods that the strategy calls in each of vLLM's worker processes through `collective_rpc`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class WorkerExtension:
    """Extension of vLLM's worker class (`worker_extension_cls`): vLLM adds it as a base, so `self` is a worker."""

    model_runner: Any
    weight_transfer_engine: Any
    device: Any

    def roll_prepare(self) -> None:
        """Install our sampler. Called once after the model is loaded."""
        from roll_infer_vllm.workarounds import use_tempered_sampler

        use_tempered_sampler(self.model_runner)

    def roll_opening_failure(self, bucket: dict[str, Any]) -> str:
        """Reason why this process cannot open a bucket on its device; empty if it can."""
        from roll_modeling.buckets import BucketInfo, opening_failure

        return opening_failure(BucketInfo(**bucket), str(self.device))

    def roll_load_failure(self) -> str:
        """Reason why this process failed to load a bucket of the update; empty if it loaded all of them."""
        failure: str = self.weight_transfer_engine.failure
        return failure

    def roll_release_cache(self) -> None:
        """On a CPU: return the memory pages of the KV cache to the operating system; its content is lost."""
        from roll_modeling.offload import release_pages

        for each in self.model_runner.kv_caches:
            release_pages(each)

    def roll_compare(self, entries: Sequence[tuple[str, Sequence[int]]]) -> dict[str, Any]:
        """Compare names and shapes with this process's model: different shapes, unknown and missing tensors."""
        from roll_infer_vllm.held import locate, parts
        from roll_modeling.comparing import compare

        model = self.model_runner.get_model()
        return compare(entries, lambda name: locate(model, name), parts(model))

    def roll_compare_adapter(self, entries: Sequence[tuple[str, Sequence[int]]]) -> dict[str, Any]:
        """Compare names and shapes of an adapter with this process's LoRA buffers."""
        from roll_infer_vllm.held_adapter import buffer
        from roll_modeling.adapter_updates import compare_adapter

        model = self.model_runner.get_model()
        return compare_adapter(entries, lambda name: tuple(buffer(model, name).shape))

    def roll_adapter_digests(self, entries: Sequence[tuple[str, Sequence[int]]]) -> Mapping[str, str]:
        """Digests of an adapter's tensors by name, read from the buffers that this process computes with."""
        from roll_core.spec.weights import digest
        from roll_infer_vllm.held_adapter import held

        model = self.model_runner.get_model()
        return {name: digest(held(model, name, shape)) for name, shape in entries}

    def roll_digests(self, names: Sequence[str]) -> Mapping[str, str]:
        """Digests of these tensors by name, read from the weights that this process computes with.

        With tensor parallelism only rank 0 returns digests, of the gathered tensors.
        """
        from vllm.distributed import get_tensor_model_parallel_rank

        from roll_core.spec.weights import digest
        from roll_infer_vllm.held import Reader, locate

        model = self.model_runner.get_model()
        reader, found = Reader(model), {}
        for name in names:
            part = locate(model, name)
            if part is None:
                continue
            tensor = reader.read(name, part)
            if get_tensor_model_parallel_rank() == 0:
                found[name] = digest(tensor)
        return found
