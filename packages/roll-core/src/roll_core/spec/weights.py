"""Digests of tensors, and the entries and receipts of a weight sync that contain them.

Exact definition of a tensor's digest, so that other implementations can reproduce it:

1. Take the tensor's elements in row-major order, whatever its strides, as little-endian bytes: N bytes, N >= 0.
2. Cut them into chunks of 256 KiB (`CHUNK_BYTES`). The last one may be shorter; N = 0 has none.
3. `leaf[k]` is the XXH3 128-bit hash (seed 0) of chunk k, as 16 big-endian bytes (xxHash's canonical form).
4. The digest is the XXH3 128-bit hash (seed 0) of `leaf[0] + leaf[1] + ...`, as 32 lower-case hex digits.

Shape and dtype are not part of the digest: an entry has them as separate fields. Every byte and its position count.
Chunks fit into a core's cache: a chunk that was just copied is digested without reading memory again. Chunks can be
digested in any order and in parallel. XXH3 detects accidents, not attacks.

Only a host computes XXH3. Where trainer and engine are on devices, the manifest names the digest of
`roll_core.spec.multilinear`, which a device computes, and only digests are copied to the host. A digest begins with the
name of its function, except XXH3's, and an entry whose digest is not known yet has the name alone. Arguments named
`like` are such a digest: an entry's, or empty for XXH3. A memory token leaves the choice to the tensor's device.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import xxhash

from roll_core.errors import StaleWeightsError
from roll_core.spec import multilinear
from roll_core.spec.multilinear import MULTILINEAR
from roll_core.types import TensorEntry, WeightManifest, WeightReceipt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import numpy as np
    import numpy.typing as npt
    import torch
    from torch import Tensor

    Bytes = npt.NDArray[np.uint8]

CHUNK_BYTES = 256 * 1024
"""Bytes of one leaf of a digest."""
SPAN_BYTES = 4 << 20
"""Bytes that a thread processes at a time."""

MEMORY = "memory:"
"""Prefix of an entry's digest if the tensor itself is shared, see `memory_token`. Real digests are bare hex digits."""

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
"""safetensors' dtype names by torch's."""
_TORCH_NAMES = {name: torch_name for torch_name, name in _DTYPE_NAMES.items()}


def dtype_name(tensor: Tensor) -> str:
    """The tensor's dtype as safetensors spells it, for example `BF16`. Raises `TypeError` for an unsupported dtype."""
    torch_name = str(tensor.dtype).removeprefix("torch.")
    if torch_name not in _DTYPE_NAMES:
        raise TypeError(f"weights of dtype {tensor.dtype} cannot be synchronised; convert them first")
    return _DTYPE_NAMES[torch_name]


def torch_dtype(name: str) -> torch.dtype:
    """Inverse of `dtype_name`. Raises `TypeError` if this torch lacks the dtype."""
    import torch

    dtype = getattr(torch, _TORCH_NAMES[name])
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"this torch has no dtype {name}")
    return dtype


def entry_bytes(entry: TensorEntry) -> int:
    """Bytes of the tensor that an entry describes."""
    return torch_dtype(entry.dtype).itemsize * math.prod(entry.shape)


def digest(tensor: Tensor, like: str = "") -> str:
    """Digest of a tensor, by the function of `like`. Depends only on its elements, not on device, strides or storage.

    Raises `TypeError` for a tensor that is not dense.
    """
    if not _is_multilinear(like, tensor):
        return _digest_of(_bytes(_row_major(tensor).cpu()))
    digests = Digests()
    digests.add("", tensor, like)
    return digests.read()[""]


def copy_digested(target: Tensor, source: Tensor, like: str = "") -> str:
    """Copy `source` into `target` (same shape and dtype); returns the digest of `target` after the copy.

    For XXH3 on the host faster than a copy followed by a digest: each chunk is digested while it is in cache. Large
    tensors use as many threads as torch does. For several tensors on a device, `Digests.copy` is faster. Raises
    `ValueError` if shapes or dtypes differ.
    """
    import torch

    if target.shape != source.shape or target.dtype != source.dtype:
        raise ValueError(
            f"cannot copy {dtype_name(source)} {tuple(source.shape)} into {dtype_name(target)} {tuple(target.shape)}"
        )
    target, source = target.detach(), source.detach()
    if _is_multilinear(like, target) or not (_plain(target) and _plain(source)):
        target.copy_(source)
        return digest(target, like)
    result = _digest_of(_bytes(target), _bytes(source))
    torch.autograd.graph.increment_version(target)
    return result


class Digests:
    """Digests of several tensors by name. Those that a device computes are read back together: one wait per device."""

    def __init__(self) -> None:
        self._found: dict[str, str] = {}
        self._keys: dict[torch.device, Tensor] = {}
        self._leaves: dict[torch.device, dict[str, tuple[Tensor, int]]] = {}
        """Leaves and number of bytes of each tensor, by device and name."""

    def add(self, name: str, tensor: Tensor, like: str = "") -> None:
        """Digest `tensor`, which may change afterwards. Raises `TypeError` for a tensor that is not dense.

        If `like` is the memory token of this very tensor, the token is its digest.
        """

        if like.startswith(MEMORY) and memory_token(tensor) == like:
            self._found[name] = like
        elif not _is_multilinear(like, tensor):
            self._found[name] = digest(tensor)
        else:
            leaves = multilinear.leaves_of(_row_major(tensor), self._keys_of(tensor.device))
            self._leaves.setdefault(tensor.device, {})[name] = leaves, tensor.nbytes

    def add_pieces(self, name: str, pieces: Iterable[Tensor], like: str = "") -> None:
        """Digest a tensor given by consecutive pieces of its elements in row-major order, with one piece in memory.

        Pieces may have any shapes and lie on one device. `like` names a function; it is no memory token.
        """
        import torch

        leaves: list[Tensor | bytes] = []
        num_bytes, rest = 0, None  # bytes after the last full chunk
        for piece in pieces:
            flat = _row_major(piece).reshape(-1).view(torch.uint8)
            num_bytes += flat.numel()
            flat = flat if rest is None else torch.cat([rest, flat])
            end = flat.numel() - flat.numel() % CHUNK_BYTES
            leaves.append(self._leaves_of(flat[:end], like))
            rest = flat[end:].clone()
        if rest is not None:
            leaves.append(self._leaves_of(rest, like))
        if rest is not None and _is_multilinear(like, rest):
            on_device = torch.cat([leaf for leaf in leaves if not isinstance(leaf, bytes)])
            self._leaves.setdefault(rest.device, {})[name] = on_device, num_bytes
        else:
            self._found[name] = xxhash.xxh3_128_hexdigest(b"".join(leaf for leaf in leaves if isinstance(leaf, bytes)))

    def _leaves_of(self, flat: Tensor, like: str) -> Tensor | bytes:
        """Leaves of bytes that start at a chunk boundary: on the device, or as bytes of XXH3."""
        if _is_multilinear(like, flat):
            return multilinear.leaves_of(flat, self._keys_of(flat.device))
        return _leaves_of_spans(_bytes(flat.cpu()))

    def _keys_of(self, device: torch.device) -> Tensor:
        if device not in self._keys:
            self._keys[device] = multilinear.keys(device)
        return self._keys[device]

    def copy(self, name: str, target: Tensor, source: Tensor, like: str = "") -> None:
        """Copy `source` into `target` of the same shape, converting it if dtypes differ, and digest `target`."""
        if target.dtype == source.dtype and not _is_multilinear(like, target):
            self._found[name] = copy_digested(target, source)
        else:
            target.detach().copy_(source.detach())
            self.add(name, target, like)

    def read(self) -> dict[str, str]:
        """Digests of all tensors so far, by name."""
        import torch

        for parts in self._leaves.values():
            read = torch.cat([leaves for leaves, _ in parts.values()]).cpu().numpy().astype("<i8", copy=False)
            end = 0
            for name, (leaves, num_bytes) in parts.items():
                start, end = end, end + len(leaves)
                self._found[name] = multilinear.hexdigest(read[start:end].tobytes(), num_bytes)
        self._leaves.clear()
        return dict(self._found)


def digest_function(digest_text: str) -> str:
    """Name of the function of a digest: `MULTILINEAR`, or empty for XXH3."""
    return MULTILINEAR if digest_text.startswith(MULTILINEAR) else ""


def _is_multilinear(like: str, tensor: Tensor) -> bool:
    return like.startswith(MULTILINEAR) or (like.startswith(MEMORY) and not tensor.is_cpu)


def _row_major(tensor: Tensor) -> Tensor:
    import torch

    if tensor.layout is not torch.strided:
        raise TypeError(f"weights of layout {tensor.layout} cannot be synchronised; export dense tensors")
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def _plain(tensor: Tensor) -> bool:
    """True if the tensor is contiguous on the host, without lazy conjugation or negation."""
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _bytes(tensor: Tensor) -> Bytes:
    import torch

    flat_bytes: Bytes = tensor.reshape(-1).view(torch.uint8).numpy()
    return flat_bytes


def leaves_of(target: Bytes, source: Bytes | None) -> bytes:
    """Concatenated leaves of `target`, which starts at a chunk boundary. If `source` is given, copies it into `target`
    first, chunk by chunk."""
    digests = []
    for start in range(0, len(target), CHUNK_BYTES):
        chunk = target[start : start + CHUNK_BYTES]
        if source is not None:
            chunk[:] = source[start : start + CHUNK_BYTES]
        digests.append(xxhash.xxh3_128_digest(chunk.data))
    return b"".join(digests)


_leaves_of: Callable[[Bytes, Bytes | None], bytes] = leaves_of


def set_leaf_function(function: Callable[[Bytes, Bytes | None], bytes]) -> None:
    """Replace `leaves_of` in this process by an equivalent `function`, such as the compiled one in
    `roll_weight_transports.digests`. Several threads call it concurrently."""
    global _leaves_of
    _leaves_of = function


def _digest_of(target: Bytes, source: Bytes | None = None) -> str:
    """Digest of `target`, after copying `source` into it if given."""
    return xxhash.xxh3_128_hexdigest(_leaves_of_spans(target, source))


def _leaves_of_spans(target: Bytes, source: Bytes | None = None) -> bytes:
    """Same as `leaves_of`, with threads for large tensors."""
    import torch

    def leaves(start: int) -> bytes:
        span = slice(start, start + SPAN_BYTES)
        return _leaves_of(target[span], None if source is None else source[span])

    spans = range(0, len(target), SPAN_BYTES)
    num_threads = min(torch.get_num_threads(), len(spans) // 2)
    if num_threads < 2:
        return _leaves_of(target, source)
    with ThreadPoolExecutor(num_threads) as threads:
        return b"".join(threads.map(leaves, spans))


def tensor_entry(name: str, tensor: Tensor, known_digest: str | None = None) -> TensorEntry:
    """Manifest entry of `tensor`. The digest is computed unless `known_digest` is given. The name of a function alone
    (`MULTILINEAR`, or empty for XXH3) means that the digest is computed later."""
    return TensorEntry(
        name=name,
        dtype=dtype_name(tensor),
        shape=tuple(tensor.shape),
        digest=digest(tensor) if known_digest is None else known_digest,
    )


def make_manifest(version: int, tensors: Iterable[tuple[str, Tensor]], like: str = "") -> WeightManifest:
    """Manifest of `tensors`, with digests of all bytes by the function of `like`."""
    entries = (tensor_entry(name, tensor, digest(tensor, like)) for name, tensor in tensors)
    return WeightManifest(version=version, tensors=tuple(entries))


def memory_token(tensor: Tensor) -> str:
    """Token that identifies the memory and layout of a tensor.

    Within a process, tensors with equal tokens are always equal: a write to one is a write to the other. The transport
    `shared` verifies weights by these tokens.
    """
    layout = "x".join(map(str, tensor.shape)), ".".join(map(str, tensor.stride()))
    return f"{MEMORY}{tensor.device}:{tensor.data_ptr():x}:{dtype_name(tensor)}:{layout[0]}:{layout[1]}"


def check_version(who: str, version: int, loaded: int, manifest: WeightManifest) -> None:
    """Raise `StaleWeightsError` if `version` is older than the version `loaded` of the engine, or differs from the
    manifest's. `who` names the engine in the message."""
    if version < loaded or version != manifest.version:
        raise StaleWeightsError(
            f"{who}: received version {version} with a manifest of version {manifest.version}, but has version {loaded}"
        )


def make_receipt(manifest: WeightManifest, tensors: Iterable[tuple[str, Tensor]]) -> WeightReceipt:
    """Receipt of an engine that has loaded `tensors` (by Hugging Face names) from `manifest`.

    Digests are of the functions that the manifest names. If the manifest has a memory token for a tensor and the tensor
    still has the same token, the receipt has that token.
    """
    expected = {entry.name: entry.digest for entry in manifest.tensors}
    digests = Digests()
    for name, tensor in tensors:
        digests.add(name, tensor, expected.get(name, ""))
    return WeightReceipt(version=manifest.version, digests=digests.read())
