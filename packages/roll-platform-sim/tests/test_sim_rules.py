"""Rules of CUDA: operators without a deterministic algorithm, and the choice of attention's kernel."""

import pytest
import torch
import torch.nn.functional as F
from sim_process import on_devices


def backward(function, *sizes):
    function(torch.rand(*sizes, device="sim", requires_grad=True)).sum().backward()


def interpolate(mode, *sizes):
    backward(lambda x: F.interpolate(x, scale_factor=2, mode=mode), *sizes)


def unpool(num_dims):
    pool, undo = getattr(F, f"max_pool{num_dims}d"), getattr(F, f"max_unpool{num_dims}d")
    undo(*pool(torch.rand(1, 1, *[4] * num_dims, device="sim"), 2, return_indices=True), 2)


def put(accumulate):
    x, index = torch.zeros(3, device="sim"), torch.tensor([0], device="sim")
    x.put_(index, x[:1].clone(), accumulate=accumulate)


def ctc():
    one = torch.tensor([1], device="sim")
    backward(lambda x: F.ctc_loss(x.log_softmax(-1), one[None], one * 4, one), 4, 1, 3)


def bag():
    index = torch.zeros(1, 2, dtype=torch.long, device="sim")
    backward(lambda x: F.embedding_bag(index, x, mode="max"), 3, 4)


def scatter_reduce(reduce):
    x, index = torch.ones(3, device="sim"), torch.zeros(3, dtype=torch.long, device="sim")
    x.scatter_reduce(0, index, x, reduce)


def grid(num_dims):
    points = torch.zeros(1, *[2] * num_dims, num_dims, device="sim")
    backward(lambda x: F.grid_sample(x, points, align_corners=False), 1, 1, *[3] * num_dims)


def integers():
    return torch.ones(4, dtype=torch.long, device="sim")


# The documentation of torch.use_deterministic_algorithms, in its order. It also lists `interpolate` with the modes
# `bilinear` and `trilinear`, which torch replaces by deterministic operators on devices.
RAISES = {
    "AvgPool3d": lambda: backward(lambda x: F.avg_pool3d(x, 2), 1, 1, 4, 4, 4),
    "AdaptiveAvgPool2d": lambda: backward(lambda x: F.adaptive_avg_pool2d(x, 2), 1, 1, 4, 4),
    "AdaptiveAvgPool3d": lambda: backward(lambda x: F.adaptive_avg_pool3d(x, 2), 1, 1, 4, 4, 4),
    "AdaptiveMaxPool2d": lambda: backward(lambda x: F.adaptive_max_pool2d(x, 2), 1, 1, 4, 4),
    "FractionalMaxPool2d": lambda: backward(lambda x: F.fractional_max_pool2d(x, 2, output_size=2), 1, 1, 4, 4),
    "FractionalMaxPool3d": lambda: backward(lambda x: F.fractional_max_pool3d(x, 2, output_size=2), 1, 1, 4, 4, 4),
    "MaxUnpool1d": lambda: unpool(1),
    "MaxUnpool2d": lambda: unpool(2),
    "MaxUnpool3d": lambda: unpool(3),
    "linear": lambda: interpolate("linear", 1, 1, 4),
    "bicubic": lambda: interpolate("bicubic", 1, 1, 4, 4),
    "ReflectionPad1d": lambda: backward(lambda x: F.pad(x, (1, 1), "reflect"), 1, 4),
    "ReflectionPad2d": lambda: backward(lambda x: F.pad(x, (1, 1, 1, 1), "reflect"), 1, 4, 4),
    "ReflectionPad3d": lambda: backward(lambda x: F.pad(x, (1, 1, 1, 1, 1, 1), "reflect"), 1, 4, 4, 4),
    "NLLLoss": lambda: F.nll_loss(torch.rand(1, 2, 2, 2, device="sim"), integers().view(1, 2, 2)),
    "CTCLoss": ctc,
    "EmbeddingBag": bag,
    "put_ without accumulate": lambda: put(False),
    "put_ with accumulate": lambda: put(True),
    "histc": lambda: torch.histc(torch.rand(4, device="sim")),
    "bincount": lambda: torch.bincount(integers(), torch.rand(4, device="sim")),
    "median": lambda: torch.median(torch.rand(4, 2, device="sim"), 0),
    "grid_sample": lambda: grid(2),
    "grid_sample of volumes": lambda: grid(3),
    "cumsum": lambda: torch.rand(4, device="sim").cumsum(0),
    "scatter_reduce": lambda: scatter_reduce("prod"),
}


@on_devices()
def test_operators_raise_as_documented_for_cuda():
    for call in RAISES.values():
        call()
    torch.use_deterministic_algorithms(True)
    for call in RAISES.values():
        with pytest.raises(RuntimeError, match="deterministic"):
            call()


@on_devices()
def test_operators_with_a_deterministic_algorithm_do_not_raise():
    torch.use_deterministic_algorithms(True)
    assert integers().cumsum(0).tolist() == [1, 2, 3, 4]
    assert torch.bincount(integers()).tolist() == [0, 4]
    assert torch.histc(integers(), bins=2, min=0, max=1).tolist() == [0, 4]
    torch.median(torch.rand(4, device="sim"))
    torch.rand(4, device="sim").scatter_add(0, integers().clamp(max=3), torch.rand(4, device="sim"))
    scatter_reduce("sum")
    backward(lambda x: x[integers()], 4)
    interpolate("bilinear", 1, 1, 4, 4)
    interpolate("trilinear", 1, 1, 4, 4, 4)
    backward(lambda x: F.conv2d(x, torch.rand(1, 1, 2, 2, device="sim")), 1, 1, 4, 4)
    F.nll_loss(torch.rand(4, 2, device="sim").log_softmax(-1), integers())


def attend(dtype, *, key_heads, device, masked=False, is_causal=False):
    """Attention of 4 query heads, and the gradients of its inputs."""
    torch.manual_seed(0)
    heads = (4, key_heads, key_heads)
    q, k, v = (torch.randn(2, num, 5, 8).to(dtype).to(device).requires_grad_() for num in heads)
    mask = torch.ones(5, 5, dtype=torch.bool).tril().to(device) if masked else None
    out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal, enable_gqa=key_heads != 4)
    out.square().sum().backward()
    return [each.detach().float().cpu() for each in (out, q.grad, k.grad, v.grad)]


@pytest.mark.parametrize(
    ("dtype", "key_heads", "masked", "is_fused"),
    [
        (torch.float32, 4, False, True),
        (torch.float32, 4, True, True),
        (torch.float32, 2, False, False),
        (torch.float64, 4, False, False),
        (torch.bfloat16, 4, True, True),
        (torch.bfloat16, 2, False, True),
        (torch.bfloat16, 2, True, False),
    ],
)
@on_devices()
def test_attention_is_fused_as_on_cuda(dtype, key_heads, masked, is_fused):
    from roll_platform_sim.trace import Trace

    arguments = {"key_heads": key_heads, "masked": masked, "is_causal": not masked}
    with Trace() as trace:
        found = attend(dtype, device="sim", **arguments)
    names = {event.what for event in trace.events}
    assert ("attention" in names, "attention_backward" in names) == (is_fused, is_fused)
    assert any("bmm" in name for name in names) is not is_fused
    expected = attend(torch.float64, device="cpu", **arguments)
    tolerance = 0.1 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@on_devices()
def test_kernels_of_attention_can_be_chosen():
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from roll_platform_sim.trace import Trace

    with sdpa_kernel(SDPBackend.MATH), Trace() as trace:
        attend(torch.bfloat16, key_heads=4, device="sim")
    assert "attention" not in {event.what for event in trace.events}
