"""Weight updates of an engine that runs in its own processes: a whole model, or a LoRA adapter.

worker                                    each engine process
------                                    -------------------
compare: names and shapes        ──────►  LoadedModel.act: compares them with its part of the model
load:    buckets, or a folder    ──────►  the engine's own loader
digests: names                   ──────►  LoadedModel.act: reads the loaded weights back
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import tempfile
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from typing_extensions import override

from roll_core.spec.weights import Digests, torch_dtype
from roll_weight_transports.buckets import BucketInfo, BucketWriter, opening_failure, read_bucket
from roll_weight_transports.comparing import (
    compare,
    compare_adapter,
    entries,
    rank_dim,
    refuse,
    refuse_adapter,
    unsent_digests,
)

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence

    import torch
    from torch import Tensor

    from roll_core.spec.model import LoraSpec
    from roll_core.types import WeightManifest
    from roll_modeling.engine_experts import ExpertLayout, ExpertName
    from roll_weight_transports.buckets import Incoming
    from roll_weight_transports.comparing import EngineTensor

Action = Literal["compare", "open", "load", "digest", "compare_adapter", "digest_adapter"]
"""Action of `LoadedModel.act`."""
MEMORY = Path("/dev/shm")
CONV1D = (".c_attn.weight", ".c_proj.weight", ".c_fc.weight")
"""Ends of the names of matrices that GPT-2 has as `[inputs, outputs]`."""


class EngineProcesses(ABC):
    """Calls from the worker to the engine's processes."""

    engine: str
    """Name of the engine in messages."""
    who: str
    """Role and rank of the worker, for messages."""

    @abstractmethod
    async def act(self, action: Action, argument: Any, *, version: int | None = None) -> list[Any]:
        """Call `LoadedModel.act` in each engine process. Returns the results of all of them.

        With `version`, the engine labels all further tokens with this weight version. Raises `WeightSyncError` if a
        process failed.
        """

    async def begin_update(self) -> None:
        """Prepare the engine processes for the buckets of an update."""
        return

    async def load_bucket(self, bucket: dict[str, Any]) -> None:
        """Load one bucket in each engine process. The bucket may be reused afterwards."""
        await self.act("load", bucket)

    async def finish_update(self) -> None:
        """Finish an update, also after an error. Raises `WeightSyncError` if a bucket could not be loaded."""
        return

    @abstractmethod
    async def load_adapter(self, name: str, folder: Path) -> None:
        """Replace the adapter `name` by the one in `folder`. Raises `WeightSyncError` if the engine rejects it."""

    def close(self) -> None:
        """Release resources. Idempotent."""
        return


class EngineWeights(ABC):
    """What a weight update replaces."""

    @abstractmethod
    async def compare(self, manifest: WeightManifest) -> None:
        """Raise `WeightSyncError` if the manifest does not match the engine. Changes nothing."""

    @abstractmethod
    async def load(self, incoming: Incoming) -> None:
        """Load all tensors. Raises `WeightSyncError`; the engine can take the next update also after an error."""

    @abstractmethod
    async def digests(self, manifest: WeightManifest) -> Mapping[str, str]:
        """Digests of the loaded tensors by name. The engine labels all further tokens with the manifest's version."""

    def forget(self) -> None:
        """Forget which tensors are loaded: the next update must contain all of them."""
        return

    @abstractmethod
    def close(self) -> None:
        """Release resources. Idempotent."""


class ModelWeights(EngineWeights):
    """Every tensor of the model, sent in buckets and replaced in place."""

    def __init__(self, processes: EngineProcesses, bucket_bytes: int, devices: Sequence[str]) -> None:
        """`bucket_bytes` is the bucket size; `devices` are the devices of the engine processes."""
        self._processes = processes
        self.writer = BucketWriter(bucket_bytes, devices)
        self._unsent: Mapping[str, str] = {}
        self._digests: Mapping[str, str] = {}
        """Digests of the loaded tensors; empty if an update has not completed."""

    @override
    async def compare(self, manifest: WeightManifest) -> None:
        processes = self._processes
        refuse(processes.who, processes.engine, manifest, await processes.act("compare", entries(manifest)))
        self._unsent = unsent_digests(processes.who, manifest, self._digests)

    @override
    async def load(self, incoming: Incoming) -> None:
        processes, writer = self._processes, self.writer
        self.forget()
        await processes.begin_update()
        try:
            following = await asyncio.to_thread(next, incoming, None)
            trial = writer.trial(following[1]) if following is not None else None
            if trial is not None:
                writer.check_trial(await processes.act("open", trial.plain()))
            while following is not None:
                bucket, following = await asyncio.to_thread(writer.fill, incoming, following)
                await processes.load_bucket(bucket.plain())
        finally:
            writer.release()
            await processes.finish_update()
        incoming.refuse_missing()

    @override
    async def digests(self, manifest: WeightManifest) -> Mapping[str, str]:
        expected = [(entry.name, entry.dtype, entry.digest) for entry in manifest.tensors]
        read = _merged(await self._processes.act("digest", expected, version=manifest.version), manifest)
        self._digests = {**self._unsent, **read}
        return self._digests

    @override
    def forget(self) -> None:
        self._digests = {}

    @override
    def close(self) -> None:
        self.writer.close()
        self._processes.close()


class AdapterWeights(EngineWeights):
    """The single LoRA adapter, written in PEFT's format. The base model keeps its initial weights."""

    def __init__(self, processes: EngineProcesses, name: str, lora: LoraSpec) -> None:
        """`name` is the adapter's name in requests."""
        self._processes, self._name, self._lora = processes, name, lora
        memory = MEMORY if MEMORY.is_dir() else None
        self._folder = Path(tempfile.mkdtemp(prefix="roll-adapter-", dir=memory))
        self._zeros: dict[str, list[int]] = {}
        """Shapes, by name, of tensors that the engine requires and the manifest does not have."""
        self._split: dict[str, dict[str, int]] = {}
        """See `LoadedModel.adapter_parts`."""

    @override
    async def compare(self, manifest: WeightManifest) -> None:
        processes = self._processes
        results = await processes.act("compare_adapter", entries(manifest))
        refuse_adapter(processes.who, processes.engine, manifest, self._lora, results)
        self._zeros, self._split = dict(results[0]["required"]), dict(results[0]["split"])

    @override
    async def load(self, incoming: Incoming) -> None:
        await asyncio.to_thread(self._write, incoming)
        await self._processes.load_adapter(self._name, self._folder)

    @override
    async def digests(self, manifest: WeightManifest) -> Mapping[str, str]:
        expected = [(entry.name, list(entry.shape), entry.digest) for entry in manifest.tensors]
        return _merged(await self._processes.act("digest_adapter", expected, version=manifest.version), manifest)

    @override
    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        self._processes.close()

    def _write(self, incoming: Incoming) -> None:
        tensors = collected(incoming)
        some = next(iter(tensors.values()))
        tensors = dict(split_adapter(tensors, self._split))
        tensors |= {name: some.new_zeros(shape) for name, shape in self._zeros.items()}
        write_adapter(self._folder, tensors, self._lora.max_rank)


def collected(incoming: Incoming) -> dict[str, Tensor]:
    """Copy all incoming tensors to the host; transports may reuse their buffers. Raises `WeightSyncError`."""
    tensors = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in incoming}
    incoming.refuse_missing()
    return tensors


def split_adapter(
    tensors: Mapping[str, Tensor], layers: Mapping[str, Mapping[str, int]]
) -> Iterator[tuple[str, Tensor]]:
    """The tensors, with the parts of each of `layers` (outputs by name) in its place: all have its A."""
    import torch

    for name, tensor in tensors.items():
        layer, separator, side = name.rpartition(".lora_")
        parts = layers.get(layer)
        if parts is None:
            yield name, tensor
            continue
        factors = [tensor] * len(parts) if side.startswith("A") else torch.split(tensor, list(parts.values()))
        for part, factor in zip(parts, factors, strict=True):
            yield f"{part}{separator}{side}", factor.clone()


def write_adapter(folder: Path, tensors: Mapping[str, Tensor], rank: int) -> None:
    """Write the adapter as peft does. B already contains the scale, so `lora_alpha` equals the rank.

    Layers of a smaller rank are filled up with zeros: engines store the parts of a fused layer with one rank.
    """
    from safetensors.torch import save_file

    stored, written = folder / "adapter_model.safetensors", folder / "written"
    save_file({f"base_model.model.{name}": _padded(name, tensor, rank) for name, tensor in tensors.items()}, written)
    os.replace(written, stored)  # processes that have mapped the old file keep its content
    layers = sorted({name.rpartition(".lora_")[0] for name in tensors})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": layers}
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")


def _padded(name: str, factor: Tensor, rank: int) -> Tensor:
    """A `[R, I]` or B `[O, R]` of a layer with zeros up to `rank`."""
    import torch

    lacking = list(factor.shape)
    lacking[rank_dim(name)] = rank - lacking[rank_dim(name)]
    return torch.cat([factor, factor.new_zeros(lacking)], dim=rank_dim(name))


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedTensor(ABC):
    """Location of a tensor of the Hugging Face model in an engine's torch model."""

    module: Any
    parameter: str
    """Name of the module's parameter, such as `weight`."""
    index: int | None = None
    """Position among the fused tensors; None if the tensor is not fused."""

    @property
    def keys(self) -> tuple[Hashable, ...]:
        """Identity of the tensor: equal for two names of one tensor (tied embeddings)."""
        return ((id(getattr(self.module, self.parameter)), self.index),)

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Shape of the full tensor, over all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedTensor(LoadedTensor):
    """Location of a tensor that Hugging Face's model fuses as the engine does, such as `gate_up_proj` of GLM-4.

    The engine shards its members one by one. Its keys are those of the members, under whichever names they are sent.
    """

    members: tuple[Any, ...]
    """Each a `LoadedTensor` of the engine, of consecutive rows."""

    @property
    @override
    def keys(self) -> tuple[Hashable, ...]:
        return tuple(key for member in self.members for key in member.keys)

    @property
    @override
    def shape(self) -> tuple[int, ...]:
        shapes = [member.shape for member in self.members]
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])


@dataclass(frozen=True, slots=True, kw_only=True)
class TransposedTensor(LoadedTensor):
    """Location of a matrix that Hugging Face's model has transposed, such as `Conv1D` of GPT-2."""

    of: Any
    """Location of the engine's matrix, a `LoadedTensor`."""

    @property
    @override
    def keys(self) -> tuple[Hashable, ...]:
        keys: tuple[Hashable, ...] = self.of.keys
        return keys

    @property
    @override
    def shape(self) -> tuple[int, ...]:
        shape: tuple[int, ...] = self.of.shape
        return shape[::-1]

    @classmethod
    def located(cls, name: str, model_type: str, loaded: LoadedTensor) -> LoadedTensor:
        """`loaded`, transposed if the tensor of this name is a matrix of a `Conv1D` of transformers."""
        if model_type != "gpt2" or not name.endswith(CONV1D):
            return loaded
        return cls(module=loaded.module, parameter=loaded.parameter, of=loaded)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsTensor(LoadedTensor):
    """Location of an expert tensor: of all experts, or of one."""

    name: ExpertName
    layout: ExpertLayout

    @property
    @override
    def keys(self) -> tuple[Hashable, ...]:
        parameter = id(getattr(self.module, self.parameter))
        return tuple((parameter, *key) for key in self.layout.keys(self.name))

    @property
    @override
    def shape(self) -> tuple[int, ...]:
        return self.layout.shape(self.name)


class LoadedModel(ABC):
    """The model in one engine process. Tensors have Hugging Face names."""

    device: str
    """Torch device of this process."""
    rank: int
    """Tensor parallel rank. Only rank 0 returns digests, of the gathered tensors; of each data-parallel copy one."""
    dtype: torch.dtype
    """The model's dtype. Some tensors have a wider one, such as those of routers."""

    @abstractmethod
    def locate(self, name: str) -> EngineTensor | None:
        """Location of a tensor; None if another process has it. Raises `KeyError` if no process can have it."""

    @abstractmethod
    def located(self) -> Iterable[tuple[str, EngineTensor]]:
        """All tensors that an update must contain, by the engine's names."""

    @abstractmethod
    def read(self, name: str, loaded: Any) -> Tensor:
        """Full tensor at a location, gathered over ranks. All ranks read the same tensors in the same order."""

    def expert_shards(self, loaded: Any, expert: int) -> Sequence[Tensor]:
        """Matrix of one expert at an `ExpertsTensor`, by tensor parallel rank, see `ExpertLayout.joined`.

        All ranks read the same experts in the same order. Rank 0 must get all shards; the result of others is unused.
        """
        raise NotImplementedError

    def pieces(self, name: str, loaded: Any) -> Iterator[Tensor]:
        """The full tensor at a location in consecutive pieces, one expert at a time if it has experts."""
        if not isinstance(loaded, ExpertsTensor):
            yield self.read(name, loaded)
            return
        for expert in loaded.layout.experts(loaded.name):
            yield loaded.layout.joined(loaded.name, self.expert_shards(loaded, expert))

    @abstractmethod
    def adapter_buffer(self, name: str) -> Tensor:
        """Buffer of this A `[R, I]` or B `[O, R]`, with R ≥ the adapter's rank. Raises `KeyError` if there is none."""

    def required(self, names: Sequence[str]) -> Iterator[tuple[str, list[int]]]:
        """Names and shapes of adapter tensors that the engine requires in addition to `names`."""
        yield from ()

    def adapter_parts(self, layer: str) -> Mapping[str, int]:
        """Outputs, by name, of the layers whose adapters the engine loads instead of one of `layer`; empty if it does.

        They are the parts of a layer that Hugging Face's model fuses as the engine does.
        """
        return {}

    def load(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        """Load tensors with the model's own loader."""
        raise NotImplementedError

    def act(self, action: Action, argument: Any) -> Any:
        """Run an action of the worker. Arguments and results are plain values.

        compare          names and shapes of a manifest -> the mismatches, see `compare`
        open             a bucket with test data -> the reason why this process cannot open it, empty if it can
        load             a bucket, which may be reused afterwards
        digest           names, dtypes and digests of a manifest -> digests of the loaded weights, by the same functions
        compare_adapter  names and shapes of an adapter's manifest -> the mismatches, see `compare_adapter`
        digest_adapter   names, shapes and digests of an adapter's manifest -> digests of the loaded adapter
        """
        if action == "compare":
            return compare(argument, self.locate, self.located())
        if action == "open":
            return opening_failure(BucketInfo(**argument), self.device)
        if action == "load":
            return self.load(read_bucket(BucketInfo(**argument), self.device))
        if action == "digest":
            return self._digests(argument)
        if action == "compare_adapter":
            mismatches = compare_adapter(argument, lambda name: tuple(self.adapter_buffer(name).shape))
            names = () if mismatches["unknown"] else [name for name, _ in argument]
            parts = {layer: self.adapter_parts(layer) for layer in {name.rpartition(".lora_")[0] for name in names}}
            split = {layer: dict(outputs) for layer, outputs in parts.items() if outputs}
            return mismatches | {"required": list(self.required(names)), "split": split}
        digests = Digests()
        for name, (rows, columns), like in argument:
            digests.add(name, self.adapter_buffer(name)[:rows, :columns], like)
        return digests.read()

    def _digests(self, expected: Iterable[tuple[str, str, str]]) -> dict[str, str]:
        digests = Digests()
        for name, dtype, like in expected:
            loaded = self.locate(name)
            if loaded is None:
                continue
            # On all ranks, because each has copies of its own of what is not sharded.
            pieces = (self._as_sent(piece, torch_dtype(dtype)) for piece in self.pieces(name, loaded))
            digests.add_pieces(name, pieces, like)
        return digests.read()

    def _as_sent(self, loaded: Tensor, dtype: torch.dtype) -> Tensor:
        """The tensor in the dtype in which it was sent, if it is wider than this and the model, and values are exact.

        A value that the sent dtype does not have is not the sent one: the tensor is then returned as it is, and its
        digest differs. So does a tensor that was sent in another dtype than the model's.
        """
        import torch

        if loaded.dtype == self.dtype or loaded.itemsize <= dtype.itemsize:
            return loaded
        sent = loaded.to(dtype)
        return sent if torch.equal(sent.to(loaded.dtype), loaded) else loaded


def _merged(results: Iterable[Mapping[str, str]], manifest: WeightManifest) -> Mapping[str, str]:
    """Digests of all processes in one mapping. If copies of a tensor differ, the digest of a wrong copy."""
    sent = {entry.name: entry.digest for entry in manifest.tensors}
    merged: dict[str, str] = {}
    for result in results:
        merged |= {name: digest for name, digest in result.items() if merged.get(name, sent[name]) == sent[name]}
    return merged
