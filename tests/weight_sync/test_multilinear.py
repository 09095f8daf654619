"""The digest that devices compute, against the text of `roll_core.spec.multilinear` in Python's own integers."""

import itertools
import struct
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from roll_core.errors import ContractError
from roll_core.runtime.weights import transfer
from roll_core.runtime.weights.plan import SyncPlan
from roll_core.spec.multilinear import MULTILINEAR, NUM_KEYS, keys
from roll_core.spec.providers import WeightTransportProvider
from roll_core.spec.weights import (
    CHUNK_BYTES,
    Digests,
    copy_digested,
    digest,
    make_manifest,
    make_receipt,
    memory_token,
    tensor_entry,
)
from roll_core.types import DataRank
from roll_testing.errors import raises_error
from roll_weight_transports.bucket_plan import fill, plan_buckets, views

MASK = (1 << 64) - 1


def split_mix():
    """SplitMix64 of seed 0, as Steele, Lea and Flood print it."""
    state = 0
    while True:
        state = (state + 0x9E3779B97F4A7C15) & MASK
        bits = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & MASK
        yield bits ^ (bits >> 31)


KEYS = list(itertools.islice(split_mix(), 2 * NUM_KEYS))


def documented(values: bytes) -> str:
    found = len(values).to_bytes(8, "little")
    for start in range(0, len(values), 256 * 1024):
        chunk = values[start : start + 256 * 1024]
        words = struct.unpack(f"<{-(-len(chunk) // 4)}i", chunk + bytes(-len(chunk) % 4))
        for first in (0, NUM_KEYS):
            total = sum(word * key for word, key in zip(words, KEYS[first : first + len(words)], strict=True))
            found += (total & MASK).to_bytes(8, "little")
    return "multilinear:" + xxhash.xxh3_128_hexdigest(found)


def test_the_keys_are_those_of_split_mix():
    # The first outputs for seed 0 in the test vectors of several implementations.
    assert KEYS[:3] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [key & MASK for key in keys().flatten().tolist()] == KEYS


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(5, 7),
        torch.randn(7, 5).t(),
        torch.randn(()),
        torch.zeros(3, 0),
        torch.randn(CHUNK_BYTES // 4),
        torch.randn(3 * CHUNK_BYTES // 2 + 1).bfloat16(),
        torch.randn(9 * CHUNK_BYTES // 4 + 3),  # more than a span
        torch.randn(21).bfloat16()[1:],  # not aligned to words
        torch.randn(40).to(torch.float8_e4m3fn)[3:],
        torch.arange(40, dtype=torch.uint8)[::3],
        torch.tensor([True, False, True]),
        torch.full((1000,), -1, dtype=torch.int32),
    ],
)
def test_the_digest_is_the_documented_one(tensor):
    values = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    assert digest(tensor, MULTILINEAR) == documented(values)


@settings(max_examples=40, deadline=None)
@given(num_bytes=st.integers(1, CHUNK_BYTES + 9), where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_every_single_bit_counts(num_bytes, where, bit):
    tensor = torch.zeros(num_bytes, dtype=torch.uint8)
    before = digest(tensor, MULTILINEAR)
    tensor[int(where * num_bytes)] = 1 << bit
    assert digest(tensor, MULTILINEAR) != before


def test_the_same_change_of_two_words_never_cancels():
    # Words that change by +d and -d, or by d twice, have an equal leaf only if both keys agree in all bits that d, with
    # at most 31 factors of two, does not shift out.
    low = (1 << 33) - 1
    pairs = list(zip(KEYS[:NUM_KEYS], KEYS[NUM_KEYS:], strict=True))
    seen = {(first & low, second & low) for first, second in pairs}
    assert len(seen) == NUM_KEYS
    assert not seen & {(-first & low, -second & low) for first, second in pairs}


def test_order_and_length_count():
    tensor = torch.arange(3 * CHUNK_BYTES // 8, dtype=torch.int64)
    words = tensor.clone()
    words[[5, 9]] = words[[9, 5]]
    chunks = tensor.view(3, -1)[[1, 0, 2]].reshape(-1)
    flipped = tensor.double()
    flipped[[3, 700]] *= -1
    zeros = torch.zeros(100, dtype=torch.uint8)
    others = [tensor, words, chunks, tensor[:-1], tensor.flip(0), flipped, flipped.abs(), zeros, zeros[:99], zeros[:0]]
    assert len({digest(each, MULTILINEAR) for each in others}) == len(others)


def test_functions_have_distinct_digests():
    tensor = torch.randn(3, 5)
    assert digest(tensor, digest(tensor, MULTILINEAR)) == digest(tensor, MULTILINEAR)
    assert digest(tensor, digest(tensor)) == digest(tensor)
    assert digest(tensor, memory_token(torch.zeros(2))) == digest(tensor)  # on the host
    with raises_error(TypeError, "dense"):
        digest(torch.eye(3).to_sparse(), MULTILINEAR)


def test_digests_of_several_tensors_are_those_of_each():
    tensors = {str(at): torch.randn(at, 70_000 // max(at, 1)) for at in range(4)}
    token = memory_token(tensors["3"])
    likes = {"0": MULTILINEAR, "1": "", "2": MULTILINEAR, "3": token}
    digests = Digests()
    target = torch.empty(2, 35_000)
    digests.copy("2", target, tensors["2"], MULTILINEAR)
    for name in ("0", "1", "3"):
        digests.add(name, tensors[name], likes[name])
    expected = {name: digest(each, likes[name]) for name, each in tensors.items()} | {"3": token}
    target.zero_(), tensors["0"].zero_()  # tensors may change once they are added
    assert digests.read() == expected
    assert digests.read() == expected


def test_a_digested_copy_has_the_digest_of_the_target():
    source, target = torch.randn(30, 4), torch.zeros(30, 4)
    assert copy_digested(target, source, MULTILINEAR) == digest(source, MULTILINEAR)
    assert torch.equal(target, source)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_ends_agree_on_the_function_of_the_manifest(dtype):
    exported = {"a": torch.randn(3, 5), "b": torch.randn(70), "c": torch.zeros(0)}
    sent_as = {name: each.to(dtype) for name, each in exported.items()}
    manifest = make_manifest(3, sent_as.items(), MULTILINEAR)
    (bucket,) = plan_buckets(manifest, 1 << 20)
    memory = torch.zeros(bucket.num_bytes, dtype=torch.uint8)
    assert tuple(fill(memory, bucket, iter(exported.items()))) == manifest.tensors
    receipt = make_receipt(manifest, views(memory, bucket))
    assert receipt.digests == {entry.name: entry.digest for entry in manifest.tensors}
    memory[5] ^= 1
    assert make_receipt(manifest, views(memory, bucket)).digests["a"] != receipt.digests["a"]


def test_a_sender_with_digests_by_another_function_is_named(monkeypatch):
    class Endpoint:
        address = ""

        def send(self, manifest, exported, deadline):
            return [tensor_entry(name, tensor) for name, tensor in exported]

        def close(self):
            pass

    monkeypatch.setattr(transfer, "load_transport", lambda provider: SimpleNamespace(sender=lambda setup: Endpoint()))
    sender = transfer.WeightSender(
        SimpleNamespace(
            export_weights=lambda: iter([("w", torch.ones(3))]),
            export_buffers=lambda: iter(()),
            frozen_weights=lambda: (),
            data_rank=DataRank(),
        ),
        role="actor",
        rank=0,
    )
    plan = SyncPlan(transport=WeightTransportProvider(name="own", target="own:Transport", summary="Own"))
    assert sender.prepare(plan).manifest.tensors[0].digest == ""
    assert sender.send(plan).manifest.tensors[0].digest == digest(torch.ones(3))
    plan = replace(plan, device_digests=True)
    assert sender.prepare(plan).manifest.tensors[0].digest == MULTILINEAR
    with raises_error(ContractError, "actor rank 0", "own", "w", MULTILINEAR):
        sender.send(plan)
