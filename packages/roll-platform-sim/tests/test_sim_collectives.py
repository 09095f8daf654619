"""The collective backend: results of two ranks on two devices, and what it refuses."""

import pytest
import torch
import torch.distributed as dist
from sim_process import on_devices

from roll_testing.ranks import free_port

NUM_RANKS = 2
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn)


@pytest.fixture
def port() -> int:
    return free_port()


def join(rank, port, device=None):
    torch.accelerator.set_device_index(rank if device is None else device)
    store = dist.TCPStore("127.0.0.1", port, NUM_RANKS, is_master=rank == 0)
    dist.init_process_group("simccl", store=store, rank=rank, world_size=NUM_RANKS)


def of(rank, num=2):
    """A tensor on this rank's device: (1, 2) on rank 0, (10, 20) on rank 1."""
    return torch.arange(1.0, num + 1, device="sim") * 10**rank


@on_devices(NUM_RANKS)
def test_collectives_compute(rank, port):
    join(rank, port)
    x = of(rank)
    dist.all_reduce(x)
    assert x.tolist() == [11.0, 22.0]
    dist.all_reduce(x := of(rank), dist.ReduceOp.AVG)
    assert x.tolist() == [5.5, 11.0]
    dist.broadcast(x := of(rank), src=1)
    assert x.tolist() == [10.0, 20.0]
    dist.reduce(x := of(rank), dst=0, op=dist.ReduceOp.MAX)
    assert rank == 1 or x.tolist() == [10.0, 20.0]
    parts = [torch.empty(2, device="sim") for _ in range(NUM_RANKS)]
    dist.all_gather(parts, of(rank))
    assert [part.tolist() for part in parts] == [[1.0, 2.0], [10.0, 20.0]]
    dist.all_gather_into_tensor(whole := torch.empty(4, device="sim"), of(rank))
    assert whole.tolist() == [1.0, 2.0, 10.0, 20.0]
    dist.gather(of(rank), parts if rank == 0 else None, dst=0)
    dist.scatter(x, parts if rank == 0 else None, src=0)
    assert x.tolist() == [[1.0, 2.0], [10.0, 20.0]][rank]
    dist.reduce_scatter(one := torch.empty(1, device="sim"), list(of(rank).split(1)))
    assert one.tolist() == [[11.0], [22.0]][rank]
    dist.reduce_scatter_tensor(one, of(rank), op=dist.ReduceOp.AVG)
    assert one.tolist() == [[5.5], [11.0]][rank]
    dist.all_to_all_single(x, of(rank))
    assert x.tolist() == [[1.0, 10.0], [2.0, 20.0]][rank]
    dist.all_to_all(parts := list(torch.empty(2, device="sim").split(1)), list(of(rank).split(1)))
    assert torch.cat(parts).tolist() == x.tolist()
    dist.barrier()


@on_devices(NUM_RANKS)
def test_ranks_send_to_each_other_at_once(rank, port):
    join(rank, port)
    received = torch.empty(2, device="sim")
    other = 1 - rank
    operations = [dist.P2POp(dist.isend, of(rank), other), dist.P2POp(dist.irecv, received, other)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert received.tolist() == of(other).tolist()


@on_devices(NUM_RANKS)
def test_collectives_of_objects_groups_and_shards(rank, port):
    join(rank, port)
    objects = [None] * NUM_RANKS
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": 0}, {"rank": 1}]
    alone = dist.new_group([1])
    if rank == 1:
        dist.all_reduce(x := of(rank), group=alone)
        assert x.tolist() == [10.0, 20.0]
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = torch.nn.Linear(3, 4)
    expected = model(x := torch.ones(2, 3)).tolist()
    fully_shard(model)
    assert model.weight.to_local().device == torch.device("sim", rank)
    result = model(x.to("sim"))
    result.sum().backward()
    assert result.tolist() == expected
    assert model.weight.grad.full_tensor().tolist() == [[2.0] * 3] * 4


@on_devices(NUM_RANKS)
def test_dtypes_that_gloo_lacks_are_moved_as_bytes(rank, port):
    join(rank, port)
    for dtype in DTYPES:
        x = torch.tensor([1.0, 0.0]).to(dtype).to("sim") if rank == 0 else torch.zeros(2, device="sim").to(dtype)
        dist.broadcast(x, src=0)
        assert x.float().tolist() == [1.0, 0.0]


@on_devices(NUM_RANKS)
def test_tensors_of_the_host_are_refused(rank, port):
    join(rank, port)
    with pytest.raises(RuntimeError):
        dist.all_reduce(torch.ones(1))
    with pytest.raises(RuntimeError):
        dist.all_reduce(torch.ones(2, 2, device="sim")[:, 0])  # not contiguous
    dist.barrier()


@on_devices(NUM_RANKS)
def test_ranks_on_one_device_are_refused(rank, port):
    join(rank, port, device=1)
    with pytest.raises(RuntimeError, match="Duplicate device"):
        dist.all_reduce(torch.ones(1, device="sim"))
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:  # its process serves the store, from which the other rank still reads
        store.wait(["refused"])
    else:
        store.set("refused", "")
