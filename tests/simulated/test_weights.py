"""Publishes and offloads on a simulated device: what crosses to the host, and what the host waits for."""

from __future__ import annotations

from typing import Any

import pytest

from shared_tests.simulated import program


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return program("weight_traffic", folder=tmp_path_factory.mktemp("weights"))


def test_a_device_computes_the_digests_of_the_host(found):
    pairs = found["digests"]
    assert all(device == host for device, host in pairs)
    assert len({host for _, host in pairs}) == len(pairs)


@pytest.mark.parametrize("part", ["sample", "sample of pages", "shared", "sender", "receiver"])
def test_a_publish_copies_only_digests_to_the_host(found, part):
    traffic = found["publishes"][part]
    assert traffic["d2h"] == (part != "shared")  # its proof are addresses
    assert traffic["d2h_bytes"] <= 40 * 16  # a leaf of each of the 40 tensors
    assert traffic["h2d"] == 0


def test_a_sample_is_of_pages_all_over_the_tensor(found):
    assert found["changed_samples"] == [True, True, False, True]


def test_an_offload_copies_blocks_and_waits_once(found):
    traffic = found["offloads"]
    for part in ("optimizer", "grads"):
        out, back = traffic[f"offload {part}"], traffic[f"onload {part}"]
        flags = part == "grads"  # which gradients are zero
        assert out["wait"] == back["wait"] == 1
        assert out["h2d"] == back["d2h"] == 0
        assert 8 <= out["d2h"] - flags == back["h2d"] <= 16


def test_offloaded_bits_and_memory_return(found):
    traffic = found["offloads"]
    assert all(traffic["equal"])
    assert traffic["left"] == [0, 0, 0]
    assert traffic["peak"] <= traffic["num_bytes"] * 9 / 8 + 512
