"""What the planner is told, by hand on a model of round numbers. Needs no SGLang."""

import pytest

from roll_core.spec.plan import MemoryInput
from roll_infer_sglang.config import SglangConfig
from roll_infer_sglang.memory import memory
from roll_tools.sizes import model_size

MODEL = model_size(
    {
        "model_type": "llama", "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    }
)  # fmt: skip
P = 2 * 64_000 + 64 + 4 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64)
TOKEN = 2 * 4 * 32
"""Elements that a token has in the cache: keys and values of four layers, two heads of 16."""
MIB = 2**20


def asked(keys, **more):
    given = {"dtype": "bf16", "slot_bytes": 100 * MIB}
    return memory(MemoryInput(model=MODEL, config=SglangConfig.model_validate(keys), **{**given, **more}))


def by_what(answer):
    return {use.what: use.num_bytes for use in answer.uses}


@pytest.mark.parametrize(
    ("keys", "more", "weights", "cache"),
    [
        ({"mem_fraction_static": 0.5}, {}, 2 * P, 50 * MIB - 2 * P),
        ({"mem_fraction_static": 0.5, "tp_size": 2}, {}, P, 50 * MIB - P),
        ({"mem_fraction_static": 0.5}, {"num_slots": 4}, P // 2, 50 * MIB - P // 2),
        ({"max_total_tokens": 1000}, {}, 2 * P, 1000 * TOKEN * 2),
        ({"max_total_tokens": 10**9, "mem_fraction_static": 0.5}, {}, 2 * P, 50 * MIB - 2 * P),
        ({"mem_fraction_static": 0.01}, {"slot_bytes": MIB}, 2 * P, 0),
        ({}, {"slot_bytes": None}, 2 * P, 0),
        ({}, {"on_host": True, "dtype": "fp32"}, 4 * P, 65_536 * TOKEN * 4),
        ({"max_total_tokens": 1000}, {"on_host": True, "dtype": "fp32", "num_slots": 2}, 2 * P, 1000 * TOKEN * 2),
    ],
)
def test_weights_and_cache(keys, more, weights, cache):
    assert MODEL.parameters == P
    found = by_what(asked(keys, **more))
    assert (found["weights"], found["kv cache"]) == (weights, cache)


@pytest.mark.parametrize(
    ("keys", "on_host", "gone"),
    [
        ({}, True, {"kv cache"}),
        ({}, False, {"kv cache", "weights"}),
        ({"sleep_level": 0}, False, set()),
    ],
)
def test_sglang_sleep_releases_memory(keys, on_host, gone):
    assert {use.what for use in asked(keys, on_host=on_host).uses if use.offloads} == gone


@pytest.mark.parametrize("on_host", [True, False])
def test_every_saving_reduces_the_kv_cache_further(on_host):
    savings = asked({}, on_host=on_host).savings
    caches = [by_what(asked(dict(saving.keys), on_host=on_host))["kv cache"] for saving in savings]
    assert caches == sorted(caches, reverse=True)
    assert len(set(caches)) == len(caches) > 2
    assert caches[0] < by_what(asked({}, on_host=on_host))["kv cache"]
