"""Tensors survive the way through a bucket, whatever fits into it."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from roll_core.modeling.buckets import BucketInfo, BucketWriter, read_bucket

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="engines run on Linux")


def sent_through(tensors, bucket_bytes):
    """What arrives, and the number of buckets."""
    writer = BucketWriter(bucket_bytes)
    incoming, arrived, count = iter(tensors), [], 0
    following = next(incoming, None)
    while following is not None:
        bucket, following = writer.fill(incoming, following)
        received = BucketInfo(**json.loads(json.dumps(bucket.plain())))
        arrived += read_bucket(received)
        count += 1
    writer.close()
    return arrived, count


def some_tensors():
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 5), (), (7,), (0, 4), (64, 33), (1,)]
    tensors = [torch.randn(shape, generator=generator) for shape in shapes]
    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.float32, torch.bfloat16, torch.int64]
    return [(f"t{at}", each.to(dtype)) for at, (each, dtype) in enumerate(zip(tensors, dtypes, strict=True))]


@pytest.mark.parametrize("bucket_bytes", [1, 200, 1 << 20])
def test_tensors_arrive_as_they_were_sent(bucket_bytes):
    arrived, _ = sent_through(some_tensors(), bucket_bytes)
    assert [name for name, _ in arrived] == [name for name, _ in some_tensors()]
    for (_, one), (_, other) in zip(arrived, some_tensors(), strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


def test_a_tensor_that_is_larger_than_a_bucket_travels_alone():
    tensors = [("small", torch.ones(1)), ("large", torch.ones(100)), ("next", torch.ones(1))]
    assert sent_through(tensors, 16)[1] == 3
    assert sent_through(tensors, 4096)[1] == 1


def test_strided_tensors_arrive_in_their_own_order():
    matrix = torch.arange(6.0).view(2, 3)
    ((_, arrived),) = sent_through([("t", matrix.t())], 1024)[0]
    assert arrived.tolist() == matrix.t().tolist()


def test_what_arrived_stays_when_the_bucket_is_filled_again():
    arrived, count = sent_through([("a", torch.full((8,), 1.0)), ("b", torch.full((8,), 2.0))], 32)
    assert count == 2
    assert arrived[0][1].tolist() == [1.0] * 8
