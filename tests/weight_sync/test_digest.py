import struct

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from roll_core.spec.weights import (
    CHUNK_BYTES,
    copy_digested,
    digest,
    dtype_name,
    make_manifest,
    make_receipt,
    memory_token,
    tensor_entry,
    torch_dtype,
)
from roll_core.types import TensorEntry, WeightManifest
from roll_testing.errors import raises_error


def documented(values: bytes) -> str:
    """The digest as the text of `roll_core.spec.weights` says it, with nothing of its code."""
    leaves = b""
    for start in range(0, len(values), 256 * 1024):
        leaves += xxhash.xxh3_128(values[start : start + 256 * 1024], seed=0).digest()
    return xxhash.xxh3_128(leaves, seed=0).hexdigest()


def row_major(tensor: torch.Tensor, code: str) -> bytes:
    """Elements one by one, as little-endian numbers."""
    return struct.pack(f"<{tensor.numel()}{code}", *tensor.reshape(-1).tolist())


@pytest.mark.parametrize(
    ("tensor", "code"),
    [
        (torch.arange(300_000, dtype=torch.int32), "i"),
        (torch.linspace(-3, 3, 131_072), "f"),
        (torch.linspace(-3, 3, 65_537).double(), "d"),
        (torch.linspace(-3, 3, 77).half(), "e"),
        (torch.arange(12, dtype=torch.int64).view(3, 4).t(), "q"),
        (torch.arange(40, dtype=torch.uint8)[::3], "B"),
        (torch.tensor(-7, dtype=torch.int16), "h"),
        (torch.zeros(3, 0), "f"),
        (torch.tensor([True, False, True]), "?"),
    ],
)
def test_the_digest_is_the_documented_one(tensor, code):
    assert digest(tensor) == documented(row_major(tensor, code))


def test_the_hash_is_xxh3_as_its_authors_publish_it():
    # XXH3_128bits of nothing, seed 0, from the test vectors of xxHash.
    assert digest(torch.zeros(0)) == "99aa06d3014798d86001c324468d497f"


def test_bfloat16_is_digested_as_the_upper_half_of_float32():
    values = torch.tensor([1.0, -2.5, 3.140625])
    upper = b"".join(struct.pack("<f", value)[2:] for value in values.tolist())
    assert digest(values.bfloat16()) == documented(upper)


def test_threads_do_not_change_the_digest():
    tensor = torch.randn(5_000_000)
    expected = documented(tensor.numpy().tobytes())
    before = torch.get_num_threads()
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            target = torch.zeros_like(tensor)
            assert digest(tensor) == expected
            assert copy_digested(target, tensor) == expected
            assert torch.equal(target, tensor)
    finally:
        torch.set_num_threads(before)


@settings(max_examples=60)
@given(
    num_bytes=st.integers(1, 3 * CHUNK_BYTES),
    where=st.floats(0, 1, exclude_max=True),
    bit=st.integers(0, 7),
)
def test_every_single_bit_counts(num_bytes, where, bit):
    tensor = torch.zeros(num_bytes, dtype=torch.uint8)
    before = digest(tensor)
    tensor[int(where * num_bytes)] = 1 << bit
    assert digest(tensor) != before


def test_swapped_words_and_swapped_chunks_change_the_digest():
    tensor = torch.arange(3 * CHUNK_BYTES // 8, dtype=torch.int64)
    words = tensor.clone()
    words[[5, 9]] = words[[9, 5]]
    chunks = tensor.view(3, -1)[[1, 0, 2]].reshape(-1)
    assert len({digest(tensor), digest(words), digest(chunks)}) == 3


def test_digest_changes_if_two_signs_flip():
    # What a sum of words times odd numbers, modulo 2**64, would miss: the top bits of two words.
    tensor = torch.ones(1000, dtype=torch.float64)
    flipped = tensor.clone()
    flipped[[3, 700]] *= -1
    assert digest(flipped) != digest(tensor)


@pytest.mark.parametrize(
    "make", [lambda: torch.randn(70, 33), lambda: torch.randn(33, 70).t(), lambda: torch.randn(())]
)
@pytest.mark.parametrize("strided", [False, True])
def test_a_digested_copy_is_a_copy_and_the_digest_of_the_target(make, strided):
    source = make()
    target = torch.zeros(*source.shape, 2)[..., 0] if strided else torch.zeros(source.shape)
    assert copy_digested(target, source) == digest(source) == digest(target)
    assert torch.equal(target, source)


def test_a_digested_copy_tells_autograd_that_the_target_changed():
    weight = torch.nn.Parameter(torch.ones(4))
    product = (weight * weight).sum()
    copy_digested(weight, torch.zeros(4))
    with raises_error(RuntimeError, "inplace"):
        product.backward()


def test_a_copy_between_different_shapes_or_dtypes_is_refused():
    with raises_error(ValueError, "F32", "3", "4"):
        copy_digested(torch.zeros(4), torch.zeros(3))
    with raises_error(ValueError, "F32", "BF16"):
        copy_digested(torch.zeros(3).bfloat16(), torch.zeros(3))


def test_names_of_dtypes_are_those_of_safetensors(tmp_path):
    from safetensors.torch import save_file

    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn]
    save_file({str(dtype): torch.zeros(2).to(dtype) for dtype in dtypes}, tmp_path / "dtypes.safetensors")
    raw = (tmp_path / "dtypes.safetensors").read_bytes()
    for dtype in dtypes:
        name = dtype_name(torch.zeros(1).to(dtype))
        assert f'"{dtype}":{{"dtype":"{name}"'.encode() in raw
        assert torch_dtype(name) is dtype


def test_a_layout_that_is_not_dense_is_refused():
    with raises_error(TypeError, "dense"):
        digest(torch.eye(3).to_sparse())


def test_manifest_and_receipt_of_equal_tensors_agree():
    tensors = {"a": torch.randn(3, 5), "b": torch.randn(7).bfloat16()}
    manifest = make_manifest(4, tensors.items())
    assert manifest.tensors[0] == TensorEntry(name="a", dtype="F32", shape=(3, 5), digest=digest(tensors["a"]))
    receipt = make_receipt(manifest, {name: tensor.clone() for name, tensor in tensors.items()}.items())
    assert receipt.version == 4
    assert receipt.digests == {entry.name: entry.digest for entry in manifest.tensors}


def test_a_receipt_names_memory_only_where_it_is_the_very_memory():
    live = torch.randn(6, 4)
    entry = tensor_entry("w", live, memory_token(live))
    manifest = WeightManifest(version=1, tensors=(entry,))
    assert make_receipt(manifest, [("w", torch.nn.Parameter(live))]).digests["w"] == entry.digest
    for other in (live.clone(), live.view(4, 6), live[1:], live.t()):
        assert make_receipt(manifest, [("w", other)]).digests["w"] == digest(other)
