"""Tensors of simulated devices: what mixes, what moves, and results compared with the CPU's."""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from sim_process import on_devices


@on_devices()
def test_tensors_of_host_and_device_do_not_mix():
    x, y = torch.ones(3, device="sim:0"), torch.ones(3)
    for mix in (lambda: x + y, lambda: x.add_(y), lambda: torch.cat([x, y]), lambda: x @ y, lambda: y.add_(x)):
        with pytest.raises(RuntimeError, match="cpu"):
            mix()
    with pytest.raises(RuntimeError, match="sim:1"):
        x + torch.ones(3, device="sim:1")
    with pytest.raises(RuntimeError, match="cpu"):
        F.embedding(torch.zeros(2, dtype=torch.long), torch.ones(3, 4, device="sim"))
    with pytest.raises(RuntimeError, match="cpu"):
        torch.stack([x[0], y[0]])  # only pointwise operators take numbers of the host
    with pytest.raises(TypeError, match="numpy"):
        x.numpy()


@on_devices()
def test_numbers_and_indices_of_the_host_mix_as_on_cuda():
    x = torch.arange(4.0, device="sim")
    assert (x + torch.tensor(1.0)).tolist() == [1.0, 2.0, 3.0, 4.0]
    assert torch.where(x > 1, x, torch.tensor(7.0)).tolist() == [7.0, 7.0, 2.0, 3.0]
    assert x[torch.tensor([3, 0])].tolist() == [3.0, 0.0]
    assert x[torch.tensor([True, False, True, False])].tolist() == [0.0, 2.0]
    x[torch.tensor([1])] = torch.tensor(9.0)
    assert x.masked_fill(x > 8, torch.tensor(-1.0)).tolist() == [0.0, -1.0, 2.0, 3.0]
    assert (torch.tensor([5, 7], device="sim:0") // 2).tolist() == [2, 3]


@on_devices()
def test_products_of_integers_are_refused():
    x = torch.ones(2, 2, dtype=torch.long, device="sim")
    for product in (lambda: x @ x, lambda: torch.bmm(x[None], x[None]), lambda: torch.einsum("ij,jk", x, x)):
        with pytest.raises(NotImplementedError):
            product()
    assert (x * x).sum().item() == 4


@on_devices()
def test_ties_survive_moves():
    first, second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    first.weight = second.weight
    model, weight = torch.nn.Sequential(first, second), first.weight
    for device in ("sim:0", "sim:1", "cpu"):
        model.to(device)
        assert first.weight is second.weight is weight
        assert first.weight.device == torch.device(device)
    weight.data = weight.data.to("sim:0")
    assert copy.deepcopy(model)[0].weight.device == torch.device("sim:0")


@on_devices()
def test_tensors_are_pickled_with_their_device():
    x, file = torch.arange(5.0, device="sim:1"), io.BytesIO()
    torch.save({"x": x, "view": x[2:]}, file)
    file.seek(0)
    loaded = torch.load(file)
    assert loaded["x"].device == torch.device("sim:1")
    assert loaded["view"].tolist() == [2.0, 3.0, 4.0]
    file.seek(0)
    assert torch.load(file, map_location="cpu")["x"].tolist() == x.tolist()


@on_devices()
def test_generators_are_those_of_their_device():
    torch.manual_seed(3)  # seeds host and devices
    host, device = torch.rand(4), torch.rand(4, device="sim:0")
    torch.manual_seed(3)
    assert torch.equal(torch.rand(4, device="sim:0"), device)
    torch.rand(4, device="sim:1")
    assert torch.equal(torch.rand(4), host)
    generator = torch.Generator("sim:0").manual_seed(5)
    state = generator.get_state()
    drawn = torch.randn(3, device="sim:0", generator=generator)
    generator.set_state(state)
    assert torch.equal(torch.randn(3, device="sim:0", generator=generator), drawn)
    with pytest.raises(RuntimeError, match="generator"):
        torch.randn(3, device="sim:0", generator=torch.Generator())
    with torch.random.fork_rng(device_type="sim"):
        torch.rand(1, device="sim:0")


@on_devices()
def test_streams_events_and_devices_have_their_scope():
    sim = torch.get_device_module("sim")
    with sim.device(1):
        assert sim.current_device() == 1
        assert torch.empty(1, device="sim").device.index == 1
    assert sim.current_device() == 0
    stream = sim.Stream()
    with sim.stream(stream):
        assert sim.current_stream() == stream != sim.default_stream()
    assert sim.current_stream() == sim.default_stream()
    first, second = sim.Event(enable_timing=True), sim.Event(enable_timing=True)
    first.record()
    second.record()
    second.synchronize()
    assert second.query()
    assert first.elapsed_time(second) >= 0
    assert sim.get_device_properties(1).total_memory == sim.mem_get_info(1)[1]


def cases():
    """Calls with every kind of argument and result: lists, optional tensors, views, in place, out, several results."""
    torch.manual_seed(0)
    x, y, index = torch.randn(4, 6), torch.randn(6, 4), torch.tensor([[0, 2], [1, 1]])
    return {
        "mm": (lambda x, y: x @ y, (x, y)),
        "softmax": (lambda x: F.log_softmax(x, -1), (x,)),
        "layer_norm": (lambda x: F.layer_norm(x, (6,), torch.ones_like(x[0])), (x,)),
        "cat": (lambda x, y: torch.cat([x, y.T, x[:1]]), (x, y)),
        "topk": (lambda x: torch.topk(x, 3)[0], (x,)),
        "gather": (lambda x, index: x.gather(1, index), (x, index)),
        "index_put": (lambda x, index: x.index_put((index[0],), x[:2] * 2, accumulate=True), (x, index)),
        "nonzero": (lambda x: (x > 0).nonzero(), (x,)),
        "unique": (lambda index: torch.unique(index, return_counts=True)[1], (index,)),
        "view": (lambda x: x.T[1:, ::2].reshape(-1).unfold(0, 3, 2), (x,)),
        "foreach": (lambda x, y: torch.cat(torch._foreach_add([x, y.T], 1.0)), (x, y)),
        "complex": (lambda x: torch.view_as_real(torch.fft.fft(x).conj() * 2), (x,)),
        "conv": (lambda x: F.conv1d(x[None], x.reshape(2, 4, 3), padding=1), (x,)),
        "max_pool": (lambda x: F.max_pool1d(x, 2), (x,)),
        "batch_norm": (lambda x: F.batch_norm(x, torch.zeros_like(x[0]), torch.ones_like(x[0]), training=True), (x,)),
        "einsum": (lambda x, y: torch.einsum("ij,jk->ki", x, y), (x, y)),
        "sort": (lambda x: x.sort(dim=1, descending=True)[0].cumsum(1), (x,)),
        "half": (lambda x, y: (x.bfloat16() @ y.bfloat16()).float(), (x, y)),
        "sgn": (lambda x: x.sgn() * x, (x,)),
        "empty": (lambda x: x[:0].sum(0), (x,)),
    }


@on_devices()
def test_results_and_gradients_equal_those_of_the_cpu():
    for name, (function, inputs) in cases().items():
        outputs, gradients = [], []
        for device in ("cpu", "sim:1"):
            moved = [each.detach().to(device).requires_grad_(each.is_floating_point()) for each in inputs]
            result = function(*moved)
            assert result.device == torch.device(device)
            if result.requires_grad:
                result.square().sum().backward()
            outputs.append(result.detach().cpu())
            gradients.append([each.grad.cpu() for each in moved if each.grad is not None])
        torch.testing.assert_close(*outputs, rtol=0, atol=0, msg=name)
        torch.testing.assert_close(*gradients, rtol=0, atol=0, msg=name)


@on_devices()
def test_integers_have_histograms_as_on_cuda():
    assert torch.histc(torch.tensor([0, 2, 1, 1], device="sim"), bins=3, min=0, max=2).tolist() == [1, 2, 1]


@on_devices()
def test_training_steps_equal_those_of_the_cpu():
    losses = {}
    for device in ("cpu", "sim:0"):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4)).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        x, y = torch.randn(5, 8).to(device), torch.tensor([0, 1, 2, 3, 0]).to(device)
        losses[device] = []
        for _ in range(3):
            with torch.autocast(torch.device(device).type, dtype=torch.bfloat16):
                loss = F.cross_entropy(model(x).float(), y)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses[device].append(loss.item())
    assert losses["cpu"] == pytest.approx(losses["sim:0"], rel=1e-2)
