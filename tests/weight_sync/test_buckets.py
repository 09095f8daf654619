import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from roll_core.errors import MissingTensorError, UnexpectedTensorError, WeightSyncError
from roll_core.spec.weights import digest, make_manifest
from roll_core.types import TensorEntry, WeightManifest
from roll_testing.errors import raises_error
from roll_weight_transports.bucket_plan import fill, plan_buckets, require_exhausted, views


def offered(*sizes):
    return WeightManifest(
        version=1,
        tensors=tuple(
            TensorEntry(name=f"t{at}", dtype="F32", shape=(size,), digest="") for at, size in enumerate(sizes)
        ),
    )


def test_a_tensor_is_never_cut_and_a_larger_one_travels_alone():
    buckets = plan_buckets(offered(16, 16, 100, 0, 16), 256)
    names = [[part.entry.name for part in bucket.slices] for bucket in buckets]
    assert names == [["t0", "t1"], ["t2"], ["t3", "t4"]]
    assert [bucket.num_bytes for bucket in buckets] == [128, 400, 64]


@given(sizes=st.lists(st.integers(0, 200), max_size=30), bucket_bytes=st.integers(1, 2000))
def test_every_tensor_is_in_one_bucket_in_order(sizes, bucket_bytes):
    buckets = plan_buckets(offered(*sizes), bucket_bytes)
    assert [part.entry.name for bucket in buckets for part in bucket.slices] == [f"t{at}" for at in range(len(sizes))]
    for bucket in buckets:
        end = 0
        for part in bucket.slices:
            assert part.offset % 64 == 0
            assert part.offset >= end
            end = part.offset + part.num_bytes
        assert end == bucket.num_bytes
        assert bucket.num_bytes <= bucket_bytes or len(bucket.slices) == 1


def test_filled_bucket_can_be_read_back():
    tensors = {"a": torch.randn(3, 5), "b": torch.arange(7, dtype=torch.int8), "c": torch.randn(4, 2).t()}
    (bucket,) = plan_buckets(make_manifest(1, tensors.items()), 1 << 20)
    memory = torch.zeros(bucket.num_bytes, dtype=torch.uint8)
    sent = fill(memory, bucket, iter(tensors.items()))
    assert [entry.digest for entry in sent] == [digest(tensor) for tensor in tensors.values()]
    found = dict(views(memory, bucket))
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize(
    ("exported", "error", "facts"),
    [
        ({"t0": torch.zeros(2)}, MissingTensorError, ("t1",)),
        ({"t1": torch.zeros(3), "t0": torch.zeros(2)}, WeightSyncError, ("t1", "t0")),
        ({"t0": torch.zeros(2), "t1": torch.zeros(4)}, WeightSyncError, ("t1", "4", "3")),
        ({"t0": torch.zeros(2), "t1": torch.zeros(3), "t2": torch.zeros(1)}, UnexpectedTensorError, ("t2",)),
    ],
)
def test_an_export_that_differs_from_the_manifest_is_refused(exported, error, facts):
    (bucket,) = plan_buckets(offered(2, 3), 1 << 20)

    def take_all():
        tensors = iter(exported.items())
        fill(torch.zeros(bucket.num_bytes, dtype=torch.uint8), bucket, tensors)
        require_exhausted(tensors)

    with raises_error(error, *facts):
        take_all()
