"""Digests of tensors, and the entries and receipts made of them: how both ends of a weight sync say what they hold.

The digest of a tensor, exactly, so that another implementation can reproduce it:

1. Take the tensor's elements in row-major order, whatever its strides, as little-endian bytes: N bytes, N >= 0.
2. Cut them into chunks of 256 KiB (`CHUNK_BYTES`), the last one shorter, none for N = 0.
3. `leaf[k]` is the XXH3 128-bit hash (seed 0) of chunk k, as 16 big-endian bytes (xxHash's canonical form).
4. The digest is the XXH3 128-bit hash (seed 0) of `leaf[0] + leaf[1] + ...`, as 32 lower-case hex digits.

Shape and dtype are not part of it: an entry carries them beside it. Every byte counts, and so does its place. Chunks
fit into a core's cache, so a chunk that has just been copied is digested without going to memory again, and chunks can
be digested in any order or at once.
XXH3 finds accidents, not attackers.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import xxhash

from roll_core.errors import CorruptTensorError, StaleWeightsError
from roll_core.types import TensorEntry, WeightManifest, WeightReceipt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import numpy as np
    import numpy.typing as npt
    import torch
    from torch import Tensor

    Bytes = npt.NDArray[np.uint8]

CHUNK_BYTES = 256 * 1024
"""Bytes of one leaf of a digest."""
SPAN_BYTES = 4 << 20
"""Bytes that a thread takes at a time."""

MEMORY = "memory:"
"""How the entry of a tensor begins that is handed over as it is, see `memory_token`; digests are bare hex digits."""

_DTYPE_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "complex64": "C64",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}
"""torch's names of dtypes, and safetensors'."""
_TORCH_NAMES = {name: torch_name for torch_name, name in _DTYPE_NAMES.items()}


def dtype_name(tensor: Tensor) -> str:
    """The tensor's dtype as safetensors spells it, `BF16`."""
    torch_name = str(tensor.dtype).removeprefix("torch.")
    if torch_name not in _DTYPE_NAMES:
        raise TypeError(f"weights of dtype {tensor.dtype} cannot be synchronised; convert them first")
    return _DTYPE_NAMES[torch_name]


def torch_dtype(name: str) -> torch.dtype:
    """The inverse of `dtype_name`."""
    import torch

    found = getattr(torch, _TORCH_NAMES[name])
    if not isinstance(found, torch.dtype):
        raise TypeError(f"this torch has no dtype {name}")
    return found


def entry_bytes(entry: TensorEntry) -> int:
    """Bytes of the tensor that an entry describes."""
    return torch_dtype(entry.dtype).itemsize * math.prod(entry.shape)


def digest(tensor: Tensor) -> str:
    """The tensor's digest: the same for every device, stride and storage that holds the same values."""
    import torch

    if tensor.layout is not torch.strided:
        raise TypeError(f"weights of layout {tensor.layout} cannot be synchronised; export dense tensors")
    return _digest_of(_bytes(tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()))


def copy_digested(target: Tensor, source: Tensor) -> str:
    """Copy `source` into `target` (same shape and dtype) and return the digest of what `target` then holds.

    Costs less than a copy and a digest: each chunk is digested while it is in cache. Large tensors take as many threads
    as torch does.
    """
    import torch

    if target.shape != source.shape or target.dtype != source.dtype:
        raise ValueError(
            f"cannot copy {dtype_name(source)} {tuple(source.shape)} into {dtype_name(target)} {tuple(target.shape)}"
        )
    target, source = target.detach(), source.detach()
    if not (_plain(target) and _plain(source)):
        target.copy_(source)
        return digest(target)
    found = _digest_of(_bytes(target), _bytes(source))
    torch.autograd.graph.increment_version(target)
    return found


def _plain(tensor: Tensor) -> bool:
    """Whether its elements lie on the host one after the other, as they are."""
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _bytes(tensor: Tensor) -> Bytes:
    import torch

    found: Bytes = tensor.reshape(-1).view(torch.uint8).numpy()
    return found


def leaves_of(held: Bytes, source: Bytes | None) -> bytes:
    """The leaves of `held`, which begins with a chunk, one after the other; `source` is copied into it first, chunk by
    chunk, if there is one."""
    found = []
    for at in range(0, len(held), CHUNK_BYTES):
        chunk = held[at : at + CHUNK_BYTES]
        if source is not None:
            chunk[:] = source[at : at + CHUNK_BYTES]
        found.append(xxhash.xxh3_128_digest(chunk.data))
    return b"".join(found)


_leaves_of: Callable[[Bytes, Bytes | None], bytes] = leaves_of


def take_leaves_from(function: Callable[[Bytes, Bytes | None], bytes]) -> None:
    """Let `function` do in this process what `leaves_of` does, with the same result: `roll_core.weights.digests` has a
    compiled one. It is called from several threads at once."""
    global _leaves_of
    _leaves_of = function


def _digest_of(held: Bytes, source: Bytes | None = None) -> str:
    """The digest of `held`, into which `source` is copied first if there is one."""
    import torch

    def leaves(start: int) -> bytes:
        span = slice(start, start + SPAN_BYTES)
        return _leaves_of(held[span], None if source is None else source[span])

    spans = range(0, len(held), SPAN_BYTES)
    num_threads = min(torch.get_num_threads(), len(spans) // 2)
    if num_threads < 2:
        return xxhash.xxh3_128_hexdigest(_leaves_of(held, source))
    with ThreadPoolExecutor(num_threads) as threads:
        return xxhash.xxh3_128_hexdigest(b"".join(threads.map(leaves, spans)))


def tensor_entry(name: str, tensor: Tensor, known_digest: str | None = None) -> TensorEntry:
    """A manifest's entry for `tensor`, digested here unless the digest is known or, as an empty string, yet to come."""
    return TensorEntry(
        name=name,
        dtype=dtype_name(tensor),
        shape=tuple(tensor.shape),
        digest=digest(tensor) if known_digest is None else known_digest,
    )


def make_manifest(version: int, tensors: Iterable[tuple[str, Tensor]]) -> WeightManifest:
    """The manifest of `tensors`, every byte digested."""
    return WeightManifest(version=version, tensors=tuple(tensor_entry(name, tensor) for name, tensor in tensors))


def memory_token(tensor: Tensor) -> str:
    """Names the memory that a tensor shows, and how. Within a process two tensors with equal tokens are always equal,
    because a write to one is a write to the other: the proof of the transport `shared`."""
    layout = "x".join(map(str, tensor.shape)), ".".join(map(str, tensor.stride()))
    return f"{MEMORY}{tensor.device}:{tensor.data_ptr():x}:{dtype_name(tensor)}:{layout[0]}:{layout[1]}"


def held_digest(tensor: Tensor, expected: str) -> str:
    """What a receiver answers for a tensor that it holds, where the manifest says `expected`; see `make_receipt`."""
    if expected.startswith(MEMORY) and memory_token(tensor) == expected:
        return expected
    return digest(tensor)


def refuse_stale(who: str, version: int, held: int, manifest: WeightManifest) -> None:
    """Raise `StaleWeightsError` where an engine that holds version `held` is sent an older one, or one whose manifest
    is of another version. `who` is the engine, as its errors name it."""
    if version < held or version != manifest.version:
        raise StaleWeightsError(
            f"{who}: was sent version {version} with a manifest of version {manifest.version}"
            f" while it holds version {held}"
        )


def refuse_misfit(who: str, entry: TensorEntry, arrived: Tensor, room: Sequence[int]) -> None:
    """Raise `CorruptTensorError` unless a tensor has the dtype and shape of the manifest, and the shape that the model
    has `room` for."""
    shape, has = list(arrived.shape), list(room)
    if shape != list(entry.shape) or shape != has:
        raise CorruptTensorError(
            f"{who}: {entry.name} arrived as {shape}; the manifest says {list(entry.shape)} and the model has {has}"
        )
    if dtype_name(arrived) != entry.dtype:
        raise CorruptTensorError(
            f"{who}: {entry.name} arrived as {dtype_name(arrived)}; the manifest says {entry.dtype}"
        )


def make_receipt(
    manifest: WeightManifest, tensors: Iterable[tuple[str, Tensor]], *, role: str = "", rank: int = 0
) -> WeightReceipt:
    """The receipt of an engine that holds `tensors`, by their Hugging Face names, after it has taken in `manifest`.

    Each tensor is answered in the manifest's own terms: by the memory that it shows where the manifest names memory and
    the tensor still shows just that, otherwise by the digest of what is there.
    """
    expected = {entry.name: entry.digest for entry in manifest.tensors}
    digests = {name: held_digest(tensor, expected.get(name, "")) for name, tensor in tensors}
    return WeightReceipt(version=manifest.version, digests=digests, role=role, rank=rank)
