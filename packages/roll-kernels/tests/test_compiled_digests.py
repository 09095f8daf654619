"""The kernel that copies and digests in one pass: against xxHash's own library, and where it cannot be had."""

import logging

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import example, given, settings
from hypothesis import strategies as st

from roll_core.errors import ExtensionError
from roll_core.spec import weights
from roll_core.spec.weights import CHUNK_BYTES, copy_digested, digest, leaves_of, set_leaf_function
from roll_kernels import digests
from roll_weight_transports.digests import use_compiled_digests

GUARD = 64
EDGES = [0, 1, 63, 64, 65, 240, 241, 1023, 1024, 1025, 1087, 1088, 1089, 2047, 2048, 2049]


@pytest.fixture
def compiled():
    assert use_compiled_digests()
    set_leaf_function(digests.compiled_leaves_of)
    yield
    set_leaf_function(leaves_of)


def leaves_by_xxhash(values):
    chunks = [values[at : at + CHUNK_BYTES] for at in range(0, len(values), CHUNK_BYTES)]
    return b"".join(xxhash.xxh3_128_digest(chunk.tobytes()) for chunk in chunks)


@settings(max_examples=150)
@given(
    size=st.sampled_from(EDGES) | st.integers(0, 6000),
    chunks=st.integers(0, 2),
    offsets=st.tuples(st.integers(0, 63), st.integers(0, 63)),
    seed=st.integers(0, 9),
)
@example(size=CHUNK_BYTES - 1, chunks=1, offsets=(1, 2), seed=0)
@example(size=0, chunks=2, offsets=(0, 0), seed=0)
def test_copies_of_any_size_and_offset_have_xxhash_digests(size, chunks, offsets, seed):
    size += chunks * CHUNK_BYTES
    values = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    room = np.full(size + 2 * GUARD, 7, dtype=np.uint8)
    target = room[offsets[0] : offsets[0] + size]
    source = np.zeros(size + GUARD, dtype=np.uint8)[offsets[1] : offsets[1] + size]
    source[:] = values
    assert digests.compiled_leaves_of(target, source) == leaves_by_xxhash(values)
    assert np.array_equal(target, values)
    assert np.array_equal(source, values)
    assert (room[: offsets[0]] == 7).all()
    assert (room[offsets[0] + size :] == 7).all()
    assert digests.compiled_leaves_of(target, None) == leaves_by_xxhash(values)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_digests_are_the_same_with_and_without_it(compiled, num_threads):
    tensors = [torch.randn(5_000_000), torch.randn(3, 70), torch.zeros(0), torch.randn(33, 70).t(), torch.tensor(2.5)]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(num_threads)
        found = [copy_digested(torch.empty_like(each), each) for each in tensors]
        assert found == [digest(each) for each in tensors]
        set_leaf_function(leaves_of)
        assert found == [digest(each) for each in tensors]
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow(ci=True)
def test_without_a_compiler_digests_take_a_pass_of_their_own(monkeypatch, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    digests.library.cache_clear()
    use_compiled_digests.cache_clear()
    before = weights._leaves_of
    try:
        monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
        monkeypatch.setenv("CXX", "/no/such/compiler")
        assert not use_compiled_digests()
        assert "/no/such/compiler" in caplog.text
        with pytest.raises(ExtensionError):
            digests.compiled_leaves_of(np.zeros(1000, np.uint8), np.zeros(1000, np.uint8))
        assert weights._leaves_of is before
    finally:
        digests.library.cache_clear()
        use_compiled_digests.cache_clear()
