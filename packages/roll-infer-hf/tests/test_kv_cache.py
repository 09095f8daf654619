"""The KV cache in one buffer: what it holds after any change of its shape, and how much memory is alive meanwhile."""

import asyncio

import numpy as np
import pytest
import torch

from roll_core.types import GenerateRequest, SamplingParams
from roll_infer_hf.kv_cache import ALIGNMENT, KVCache
from shared_tests.live_bytes import LiveBytes

SIZES = {"num_layers": 3, "num_heads": 2, "head_dim": 4, "dtype": torch.float32, "device": torch.device("cpu")}
TOKEN_BYTES = 2 * 3 * 2 * 4 * 4


def test_content_survives_every_change_of_shape():
    rng = np.random.default_rng(0)
    cache = KVCache(**SIZES, max_rows=9, max_bytes=20 * ALIGNMENT * TOKEN_BYTES)
    held = torch.zeros(3, 2, 0, 2, 0, 4)
    shapes = set()
    for _ in range(200):
        used_rows, used_width = int(rng.integers(0, held.shape[2] + 1)), int(rng.integers(0, held.shape[4] + 1))
        width = int(rng.integers(max(1, used_width), 10 * ALIGNMENT))
        rows = int(rng.integers(used_rows, max(used_rows, min(9, 20 // -(-width // ALIGNMENT))) + 1))
        if rows * -(-width // ALIGNMENT) > 20:
            continue
        cache.reserve(rows, width, used_rows, used_width)
        shapes.add((cache.rows, cache.width))
        assert cache.rows >= rows
        assert cache.width >= width
        kept = cache._kv[:, :, :used_rows, :, :used_width]
        assert torch.equal(kept, held[:, :, :used_rows, :, :used_width])
        held = torch.rand(3, 2, rows, 2, width, 4)
        cache._kv[:, :, :rows, :, :width] = held
        keys, values = cache.matrices(1, rows, width)
        assert torch.equal(keys.view(rows, 2, width, 4), held[1, 0])
        assert torch.equal(values.view(rows, 2, width, 4), held[1, 1])
    assert len(shapes) > 4


def test_growing_needs_no_second_buffer():
    limit = 64 * ALIGNMENT * TOKEN_BYTES
    with LiveBytes() as memory:
        cache = KVCache(**SIZES, max_rows=64, max_bytes=limit)
        for width in range(ALIGNMENT, 17 * ALIGNMENT, ALIGNMENT):
            cache.reserve(4, width, 4 if width > ALIGNMENT else 0, width - ALIGNMENT)
    assert limit <= memory.most <= limit * (1 + 1 / 6)  # and one layer's keys on their way
    cache.release()
    assert cache._kv.untyped_storage().nbytes() == 0


def test_a_shape_beyond_the_buffer_is_refused():
    cache = KVCache(**SIZES, max_rows=4, max_bytes=8 * ALIGNMENT * TOKEN_BYTES)
    for rows, width in ((5, 1), (2, 5 * ALIGNMENT), (1, 8 * ALIGNMENT + 1)):
        with pytest.raises(ValueError, match=str(rows)):
            cache.reserve(rows, width, 0, 0)


@pytest.mark.parametrize("kernels", ["torch", "compiled"])
def test_engine_stays_within_kv_cache_gib_as_requests_arrive(with_engine, monkeypatch, kernels):
    """Requests of many lengths, one after the other: the cache of rows grows while it is in use."""
    limit = 100 * 2 * 2 * 2 * 8 * 4 * ALIGNMENT  # 100 rows of the tiny model's shortest
    allocated = []
    reserve = KVCache.reserve

    def recorded(cache, *shape):
        reserve(cache, *shape)
        allocated.append((cache, cache._buffer.nbytes))

    monkeypatch.setattr(KVCache, "reserve", recorded)

    async def act(engine):
        tasks = []
        for i, length in enumerate((3, 40, 5, 90, 60, 7, 100, 3)):
            params = SamplingParams(max_new_tokens=10 + 2 * i, ignore_eos=True, seed=1)
            request = GenerateRequest(id=str(i), prompt_ids=np.arange(length) % 90, params=params, n=3)
            tasks.append(asyncio.create_task(engine.generate(request)))
            await asyncio.sleep(0.01)
        await asyncio.gather(*tasks)
        rows = engine._core.runner._rows
        return [max(size for cache, size in allocated if (cache is rows) == of_rows) for of_rows in (True, False)]

    most, longest_prompt = with_engine(act, kv_cache_gib=limit / 2**30, kernels=kernels)
    assert most <= limit
    assert longest_prompt == 112 * 2 * 2 * 2 * 8 * 4  # 100 tokens, rounded up to 16
