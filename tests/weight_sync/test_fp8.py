"""Matrices in 8 bits: the rounding against numbers by hand and a table of E4M3 made here, and what travels."""

import math

import hypothesis.extra.numpy as arrays
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sync_workers import record_of

from roll_core.errors import CorruptTensorError, NonFiniteWeightError, UnsupportedError
from roll_core.runtime.cluster.executors.base import WorkerCall
from roll_core.runtime.weights.plan import SyncPlan
from roll_core.runtime.weights.publisher import WeightPublisher
from roll_core.spec import fp8
from roll_core.spec.fp8 import is_layers_weight, quantise_blocks, quantise_rows, to_fp8
from roll_core.spec.transport import Route
from roll_core.spec.weights import make_manifest
from roll_testing.errors import raises_error

TINY = 2.0**-126


def decoded(code):
    """The value of an E4M3 byte, by the format's definition: sign, 4 bits of exponent with bias 7, 3 of mantissa."""
    sign, exponent, mantissa = -1.0 if code & 128 else 1.0, code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    return sign * (mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10))


VALUES = np.array([decoded(code) for code in range(256)])
POSITIVE = VALUES[:127]
"""In ascending order; 127 is NaN."""


def nearest(value):
    """The byte of the nearest E4M3 number, ties to the even mantissa; zeros keep their sign."""
    distance = np.abs(POSITIVE - abs(value))
    ties = np.flatnonzero(distance == distance.min())
    code = int(min(ties, key=lambda each: each % 2))
    return code | (128 if math.copysign(1.0, value) < 0 else 0)


def quantised(rows):
    weight, scale = quantise_rows(torch.tensor(rows, dtype=torch.float32))
    return weight.float().tolist(), scale.flatten().tolist()


def test_rows_by_hand():
    rows, scales = quantised(
        [
            [448.0, 17.0, 19.0, -0.001, 0.0009],  # scale 1: 17 and 19 lie between 16, 18 and 20; steps of 2⁻⁹ at 0
            [-896.0, 3.0, 0.5, 1.0, 0.0],  # scale 2
            [0.0, 0.0, 0.0, 0.0, 0.0],
            [7.0, 7.0, 3.5, 0.4375, -7.0],  # scale 1/64: 448, 224, 28
        ]
    )
    assert scales == [1.0, 2.0, TINY, 1 / 64]
    assert rows[0] == [448.0, 16.0, 20.0, -(2.0**-9), 0.0]
    assert rows[1] == [-448.0, 1.5, 0.25, 0.5, 0.0]
    assert rows[2] == [0.0] * 5
    assert rows[3] == [448.0, 448.0, 224.0, 28.0, -448.0]


FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
MATRICES = arrays.arrays(np.float32, arrays.array_shapes(min_dims=2, max_dims=2, max_side=6), elements=FINITE)


@given(MATRICES)
def test_values_round_to_nearest_at_their_row_scale(matrix):
    weight, scale = quantise_rows(torch.from_numpy(matrix))
    codes = weight.view(torch.uint8).numpy()
    for row, (scaled,) in enumerate(scale.numpy()):
        amax = np.abs(matrix[row]).max()
        assert scaled == max(np.float32(amax) / np.float32(448), np.float32(TINY))
        for column, value in enumerate(matrix[row]):
            ratio = np.clip(np.float32(value) / np.float32(scaled), -448, 448)
            assert codes[row, column] == nearest(float(ratio))


@given(MATRICES, st.randoms(use_true_random=False), st.integers(1, 12))
def test_a_row_is_rounded_by_itself(matrix, random, chunk):
    """Whatever its place, its neighbours and how many are rounded at a time."""
    order = list(range(len(matrix)))
    random.shuffle(order)
    weight, scale = quantise_rows(torch.from_numpy(matrix))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fp8, "CHUNK_ELEMENTS", chunk)
        shuffled, scales = quantise_rows(torch.from_numpy(matrix[order]))
    assert torch.equal(shuffled.view(torch.uint8), weight.view(torch.uint8)[order])
    assert torch.equal(scales, scale[order])


def test_bf16_is_rounded_from_its_own_values():
    half = torch.randn(5, 40, generator=torch.Generator().manual_seed(1)).bfloat16()
    pairs = zip(quantise_rows(half), quantise_rows(half.float()), strict=True)
    assert all(torch.equal(one.view(torch.uint8), other.view(torch.uint8)) for one, other in pairs)


def test_huge_and_subnormal_rows():
    rows, scales = quantised([[3.4e38, -1.7e38], [1e-42, -1e-45], [TINY * 448, TINY]])
    assert all(math.isfinite(each) for row in rows for each in row)
    assert rows[0] == [448.0, -224.0]
    assert scales[1] == scales[2] == TINY
    assert rows[1] == [0.0, 0.0]  # 1e-42 is 8.5e-5 of the least scale, and the least step is 2⁻⁹
    assert rows[2] == [448.0, 1.0]


@pytest.mark.parametrize("shape", [(0, 8), (8, 0), (1, 1)])
def test_matrices_without_elements_have_a_scale_per_row_too(shape):
    weight, scale = quantise_rows(torch.zeros(shape))
    assert (weight.shape, scale.shape) == (shape, (shape[0], 1))
    assert (scale == TINY).all()


# -- blocks ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of 2 × 2, so that a few elements have several blocks."""
    monkeypatch.setattr(fp8, "BLOCK", 2)


def blocks_of(matrix, side):
    """(row, column, block) of each block, those at the edges smaller."""
    for row in range(0, matrix.shape[0], side):
        for column in range(0, matrix.shape[1], side):
            yield row // side, column // side, matrix[row : row + side, column : column + side]


def test_blocks_by_hand(small_blocks):
    matrix = [
        [448.0, 17.0, 0.0, 0.0, 7.0],  # scales 1, the least, and 1/64
        [19.0, -1.0, 0.0, 0.0, -3.5],
        [3.0, -896.0, 1.0, 2.0, 448.0],  # scales 2, 2/448 and 1
    ]
    weight, scale = quantise_blocks(torch.tensor(matrix))
    assert scale.tolist() == [[1.0, TINY, 1 / 64], [2.0, float(np.float32(2) / np.float32(448)), 1.0]]
    assert weight.float().tolist() == [
        [448.0, 16.0, 0.0, 0.0, 448.0],
        [20.0, -1.0, 0.0, 0.0, -224.0],
        [1.5, -448.0, 224.0, 448.0, 448.0],
    ]


STACKS = arrays.arrays(np.float32, arrays.array_shapes(min_dims=2, max_dims=3, max_side=5), elements=FINITE)


@given(STACKS, st.integers(1, 3), st.integers(1, 12))
def test_values_round_to_nearest_at_their_block_scale(stack, side, chunk):
    """Also of experts, and whatever number is rounded at a time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fp8, "BLOCK", side)
        patch.setattr(fp8, "CHUNK_ELEMENTS", chunk)
        weight, scale = quantise_blocks(torch.from_numpy(stack))
    stacks = (stack, weight.view(torch.uint8).numpy(), scale.numpy())
    for matrix, codes, scales in zip(*stacks, strict=True) if stack.ndim == 3 else [stacks]:
        assert scales.shape == tuple(-(-each // side) for each in matrix.shape)
        for row, column, block in blocks_of(matrix, side):
            scaled = scales[row, column]
            assert scaled == max(np.abs(block).max() / np.float32(448), np.float32(TINY))
            ratios = np.clip(block / scaled, -448, 448)
            expected = [[nearest(float(each)) for each in line] for line in ratios]
            rows, columns = slice(row * side, (row + 1) * side), slice(column * side, (column + 1) * side)
            assert codes[rows, columns].tolist() == expected


def test_blocks_are_128_by_128_and_smaller_at_the_edge():
    weight = torch.randn(2, 300, 200, generator=torch.Generator().manual_seed(1)).bfloat16()
    found, scale = quantise_blocks(weight)
    assert scale.shape == (2, 3, 2)
    for matrix, scales in zip(weight.float().numpy(), scale.numpy(), strict=True):
        for row, column, block in blocks_of(matrix, 128):
            assert scales[row, column] == np.abs(block).max() / np.float32(448)
    back = found.double() * scale.double().repeat_interleave(128, 1).repeat_interleave(128, 2)[:, :300, :200]
    assert (back - weight).abs().max() < 16 * scale.max()  # half of the largest step of E4M3


@pytest.mark.parametrize("shape", [(0, 8), (8, 0), (2, 0, 8)])
def test_matrices_without_elements_have_scales_of_blocks_too(shape):
    weight, scale = quantise_blocks(torch.zeros(shape))
    assert weight.shape == shape
    assert scale.shape == (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))


@pytest.mark.parametrize(
    ("name", "travels"),
    [
        ("model.layers.0.self_attn.q_proj.weight", True),
        ("layers.11.mlp.down_proj.weight", True),
        ("model.language_model.layers.3.mlp.gate_proj.weight", True),
        ("model.layers.1.mlp.experts.7.gate_proj.weight", True),
        ("model.layers.1.mlp.shared_expert.gate_proj.weight", True),
        ("model.layers.1.mlp.gate.weight", False),
        ("model.layers.1.mlp.shared_expert_gate.weight", False),
        ("model.layers.1.mlp.router.weight", False),
        ("model.layers.1.block_sparse_moe.router.layer.weight", False),
        ("model.layers.0.self_attn.q_proj.bias", False),
        ("model.embed_tokens.weight", False),
        ("lm_head.weight", False),
        ("model.multilayers.0.weight", False),
        ("transformer.h.0.attn.c_attn.weight", False),
    ],
)
def test_layer_weights_are_recognised_by_name(name, travels):
    assert is_layers_weight(name) is travels


def model():
    return {
        "embed.weight": torch.ones(3, 4),
        "layers.0.proj.weight": torch.tensor([[448.0, 2.0], [0.0, 0.0]]),
        "layers.0.proj.bias": torch.ones(2),
        "layers.0.norm.weight": torch.ones(2),
        "layers.0.counts.weight": torch.arange(4).view(2, 2),
    }


def test_a_matrix_is_followed_by_its_scales_and_the_rest_is_cast():
    found = list(to_fp8(iter(model().items()), torch.bfloat16))
    assert [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in found] == [
        ("embed.weight", torch.bfloat16, (3, 4)),
        ("layers.0.proj.weight", torch.float8_e4m3fn, (2, 2)),
        ("layers.0.proj.weight_scale", torch.float32, (2, 1)),
        ("layers.0.proj.bias", torch.bfloat16, (2,)),
        ("layers.0.norm.weight", torch.bfloat16, (2,)),
        ("layers.0.counts.weight", torch.int64, (2, 2)),
    ]


def test_experts_have_block_scales_and_an_unrounded_router():
    moe = {
        "model.layers.0.mlp.gate.weight": torch.ones(2, 4),
        "model.layers.0.mlp.experts.gate_up_proj": torch.ones(2, 260, 4),
        "model.layers.0.mlp.experts.down_proj": torch.ones(2, 4, 130),
        "model.layers.0.mlp.experts.gate_up_proj_bias": torch.ones(2, 260),
        "model.layers.0.conv.weight": torch.ones(4, 1, 4),
    }
    found = list(to_fp8(iter(moe.items()), None, "fp8_per_block"))
    experts, rest = "model.layers.0.mlp.experts", torch.float32
    assert [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in found] == [
        ("model.layers.0.mlp.gate.weight", rest, (2, 4)),
        (f"{experts}.gate_up_proj", torch.float8_e4m3fn, (2, 260, 4)),
        (f"{experts}.gate_up_proj_scale_inv", rest, (2, 3, 1)),
        (f"{experts}.down_proj", torch.float8_e4m3fn, (2, 4, 130)),
        (f"{experts}.down_proj_scale_inv", rest, (2, 1, 2)),
        (f"{experts}.gate_up_proj_bias", rest, (2, 260)),
        ("model.layers.0.conv.weight", rest, (4, 1, 4)),
    ]


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_non_finite_tensors_are_named_after_the_export(wrong):
    tensors, seen = model(), []
    tensors["layers.0.proj.weight"][1, 0] = wrong

    def export():
        for name, tensor in tensors.items():
            yield name, tensor
            seen.append(name)

    with raises_error(NonFiniteWeightError, "layers.0.proj.weight", "NaN"):
        list(to_fp8(export(), None))
    assert seen == list(tensors)  # other ranks wait in the same export


def test_a_model_without_such_matrices_is_refused():
    tensors = {"transformer.h.0.attn.weight": torch.ones(2, 2)}
    with raises_error(UnsupportedError, "fp8"):
        list(to_fp8(iter(tensors.items()), None))


# -- publishes ---------------------------------------------------------------------------------------------------------

SIDES = [(300, 256), (64, 96), (64, 96), (30, 40), (1000, 33), (0, 8)]
MATRIX_BYTES = sum(o * i + 4 * o for o, i in SIDES)
BLOCK_BYTES = sum(o * i + 4 * -(-o // 128) * -(-i // 128) for o, i in SIDES)
OTHER_BYTES = 2 * 1 + 17 + 2 * 5


def publisher(duo, transport, bucket_bytes=64 << 10, weight_format="fp8"):
    sources = (0,) * duo.infer.world_size if transport == "cuda_ipc" else ()
    plan = SyncPlan(
        transport=record_of(transport),
        route=Route(options={"directory": duo.directory}, sources=sources),
        dtype="BF16",
        weight_format=weight_format,
        bucket_bytes=bucket_bytes,
        deadline_s=20,
    )
    return WeightPublisher(duo.train, duo.infer, plan)


@pytest.mark.parametrize("transport", ["shared", "shm"])
def test_receipts_have_the_digests_of_fp8_values(with_duo, transport):
    async def scenario(duo):
        await WorkerCall(duo.train, "set_fault").all("in_layers")
        report = await publisher(duo, transport).publish(0)
        assert report.weight_bytes == MATRIX_BYTES + OTHER_BYTES
        (sent,) = await WorkerCall(duo.train, "values").all()
        for held in await WorkerCall(duo.infer, "values").all():
            assert len(held) == 9 + 6
            values, scales = quantised(sent["left"])
            assert held["layers.0.left.weight"] == values
            assert held["layers.0.left.weight_scale"] == [[each] for each in scales]
            assert held["layers.0.bias.weight"] == torch.tensor(sent["bias"]).bfloat16().tolist()

    with_duo(transport, scenario)


def test_receipts_are_of_the_blocks_and_their_scales(with_duo):
    async def scenario(duo):
        await WorkerCall(duo.train, "set_fault").all("in_layers")
        report = await publisher(duo, "shm", weight_format="fp8_per_block").publish(0)
        assert report.weight_bytes == BLOCK_BYTES + OTHER_BYTES
        (sent,) = await WorkerCall(duo.train, "values").all()
        for held in await WorkerCall(duo.infer, "values").all():
            weight, scale = quantise_blocks(torch.tensor(sent["left"]))
            assert held["layers.0.left.weight"] == weight.float().tolist()
            assert held["layers.0.left.weight_scale_inv"] == scale.tolist()

    with_duo("shm", scenario)


def test_an_engine_with_another_scale_fails_its_receipt(with_duo):
    async def scenario(duo):
        await WorkerCall(duo.train, "set_fault").all("in_layers")
        await duo.fault("flip:layers.0.left.weight_scale", 1)
        with raises_error(CorruptTensorError, "rank 1", "layers.0.left.weight_scale", "F32", "[64, 1]"):
            await publisher(duo, "shm").publish(0)

    with_duo("shm", scenario)


def test_buckets_do_not_change_what_is_sent(with_duo):
    """A manifest is that of the tensors one by one, whatever the size of buckets."""

    async def scenario(duo):
        await WorkerCall(duo.train, "set_fault").all("in_layers")
        found = []
        for bucket_bytes in (1 << 10, 1 << 20):
            one = publisher(duo, "shm", bucket_bytes)
            await one.publish(0)
            found.append(one._previous)
        return found, (await WorkerCall(duo.train, "values").all())[0]

    (small, large), sent = with_duo("shm", scenario)
    assert small == large
    left = quantise_rows(torch.tensor(sent["left"]))
    entries = make_manifest(0, [("layers.0.left.weight", left[0]), ("layers.0.left.weight_scale", left[1])]).tensors
    assert set(entries) < set(small.tensors)


@pytest.mark.parametrize("transport", ["shared", "shm"])
def test_publish_of_non_finite_weights_fails_and_the_next_works(with_duo, transport):
    async def scenario(duo):
        await WorkerCall(duo.train, "set_fault").all("in_layers")
        one = publisher(duo, transport)
        await one.publish(0)
        await duo.step(math.inf)
        with raises_error(NonFiniteWeightError, "layers.0.embed.weight"):
            await one.publish(1)
        await WorkerCall(duo.train, "begin").all()
        await WorkerCall(duo.train, "set_fault").all("in_layers")
        await duo.step()
        await one.publish(2)

    with_duo(transport, scenario)
