"""What our strategy can ask of each of vLLM's worker processes, besides what vLLM itself answers (`collective_rpc`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class WorkerExtension:
    """vLLM makes it a base of its worker class (`worker_extension_cls`); so `self` is a worker."""

    model_runner: Any

    def roll_prepare(self) -> None:
        """After the model is loaded."""
        from roll_infer_vllm.workarounds import use_tempered_sampler

        use_tempered_sampler(self.model_runner)

    def roll_compare(self, entries: Sequence[tuple[str, Sequence[int]]]) -> dict[str, Any]:
        """What of these names and shapes this process has otherwise, does not have, and misses."""
        from roll_infer_vllm.held import locate, parts

        model = self.model_runner.get_model()
        unknown, shapes, covered = [], {}, set()
        for name, shape in entries:
            try:
                part = locate(model, name)
            except KeyError:
                unknown.append(name)
                continue
            if part is None:
                continue
            covered.add(part.key)
            if part.shape != tuple(shape):
                shapes[name] = list(part.shape)
        missing = [name for name, part in parts(model) if part.key not in covered]
        return {"unknown": unknown, "shapes": shapes, "missing": missing}

    def roll_digests(self, names: Sequence[str]) -> Mapping[str, str]:
        """Digests of these tensors, as this process computes with them. With tensor parallelism the first rank answers
        for all."""
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
