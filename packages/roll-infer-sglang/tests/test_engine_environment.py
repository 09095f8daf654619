"""Which environment variables the server's processes get, and when."""

from __future__ import annotations

import os

import pytest

from roll_infer_sglang.engine_environment import (
    CORES,
    cores_of_slots,
    engine_environment,
    num_numa_nodes,
    usable_cores,
)
from roll_infer_sglang.registration import FORCED_BACKEND, ON_CPU

MANY = 1000
"""More slots than any host has NUMA nodes."""


def variables(device, present=None, *, num_threads=4, num_slots=1):
    return engine_environment(device, present or {}, num_threads=num_threads, num_slots=num_slots)


def test_the_cpus_engine_is_only_asked_for_on_a_cpu():
    assert variables("cpu")["SGLANG_USE_CPU_ENGINE"] == "1"
    assert variables("cpu")[FORCED_BACKEND] == "pytorch"
    assert variables("cpu")[ON_CPU]
    assert not {"SGLANG_USE_CPU_ENGINE", FORCED_BACKEND, ON_CPU, "OMP_NUM_THREADS"} & variables("cuda").keys()


def test_threads_are_shared_by_the_slots():
    assert variables("cpu", num_threads=8, num_slots=4)["OMP_NUM_THREADS"] == "2"
    assert variables("cpu", num_threads=1, num_slots=2)["OMP_NUM_THREADS"] == "1"


def test_user_variables_are_preserved():
    wanted = variables("cpu")
    assert not variables("cpu", dict.fromkeys(wanted, "mine"), num_threads=0)


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_only_expandable_segments_are_removed_from_options(name):
    options = "expandable_segments:True,max_split_size_mb:128"
    assert variables("cuda", {name: options})[name] == "max_split_size_mb:128"
    assert variables("cuda", {name: "max_split_size_mb:128, expandable_segments:True"})[name] == "max_split_size_mb:128"
    for fine in ("max_split_size_mb:128", "expandable_segments:False", ""):
        assert name not in variables("cuda", {name: fine})
    assert name not in variables("cpu", {name: options})


@pytest.mark.parametrize(
    ("num_slots", "num_threads", "rank", "expected"),
    [
        (2, 2, 0, "0|2"),
        (2, 4, 0, "0,2|4,6"),
        (2, 4, 1, "8,10|12,14"),  # after those of rank 0
        (2, 5, 2, "0,2|4,6"),  # all are taken: from the first one again
        (3, 2, 0, "0|2|4"),  # no process without a core
        (4, 0, 0, "0,2|4,6|8,10|12,14"),  # nobody says how many threads
    ],
)
def test_slots_have_as_many_cores_as_threads(num_slots, num_threads, rank, expected):
    assert cores_of_slots(range(0, 16, 2), num_slots, num_threads, rank) == expected


def test_cores_are_divided_if_slots_outnumber_numa_nodes():
    dealt = variables("cpu", num_slots=MANY, num_threads=MANY)[CORES].split("|")
    assert len(dealt) == MANY
    assert {int(each) for each in dealt} == set(usable_cores())
    assert CORES not in variables("cpu")
    assert CORES not in variables("cuda", num_slots=MANY)
    assert CORES not in variables("cpu", {CORES: "0|0"}, num_slots=MANY)


def test_a_core_is_counted_by_one_of_its_hardware_threads(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {1, 2, 3, 5, 6, 9})
    for cpu, siblings in {1: "1,5", 2: "2,6", 3: "3,7", 5: "1,5", 6: "2,6"}.items():
        file = tmp_path / f"cpu/cpu{cpu}/topology/thread_siblings_list"
        file.parent.mkdir(parents=True)
        file.write_text(f"{siblings}\n")
    assert usable_cores(tmp_path) == [1, 2, 3, 9]  # nothing is known of 9
    for cpu in (1, 5):
        (tmp_path / f"cpu/cpu{cpu}/topology/thread_siblings_list").write_text("4-6,1\n")
    assert usable_cores(tmp_path) == [1, 2, 3, 9]


def test_numa_nodes_are_counted(tmp_path):
    assert num_numa_nodes(tmp_path) == 1
    for name in ("node0", "node1", "node10", "possible"):
        (tmp_path / "node" / name).mkdir(parents=True)
    assert num_numa_nodes(tmp_path) == 3
