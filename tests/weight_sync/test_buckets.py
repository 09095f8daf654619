import torch
from hypothesis import given
from hypothesis import strategies as st

from roll_core.errors import WeightSyncError
from roll_core.types import TensorEntry, WeightManifest
from roll_testing.errors import raises_error
from roll_weight_transports.bucket_plan import fill, plan_buckets


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


def test_an_export_in_another_order_is_refused():
    (bucket,) = plan_buckets(offered(2, 3), 1 << 20)
    memory = torch.zeros(bucket.num_bytes, dtype=torch.uint8)
    with raises_error(WeightSyncError, "t1", "t0"):
        fill(memory, bucket, iter([("t1", torch.zeros(3)), ("t0", torch.zeros(2))]))
