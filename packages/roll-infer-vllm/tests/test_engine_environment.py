"""Which environment variables the engine's processes get, and when."""

from __future__ import annotations

import os

import pytest

from roll_infer_vllm.engine_environment import engine_environment, environment


def variables(device, present=None, *, num_threads=4, num_slots=1, compiles=False):
    return engine_environment(device, present or {}, num_threads=num_threads, num_slots=num_slots, compiles=compiles)


def test_cpu_variables_are_only_set_on_a_cpu():
    assert "VLLM_CPU_OMP_THREADS_BIND" in variables("cpu")
    assert not [name for name in variables("cuda") if name.startswith(("VLLM_CPU", "OMP", "TORCH"))]


def test_threads_are_shared_by_the_slots():
    assert variables("cpu", num_threads=8, num_slots=4)["OMP_NUM_THREADS"] == "2"
    assert variables("cpu", num_threads=1, num_slots=2)["OMP_NUM_THREADS"] == "1"


def test_the_workers_own_number_of_threads_is_not_the_engines():
    assert variables("cpu", {"OMP_NUM_THREADS": "8"}, num_threads=8, num_slots=2)["OMP_NUM_THREADS"] == "4"


def test_user_variables_are_preserved():
    wanted = variables("cpu")
    assert not variables("cpu", dict.fromkeys(wanted, "mine"), num_threads=0)


def test_engine_may_compile_if_configured():
    assert variables("cpu")["TORCH_COMPILE_DISABLE"] == "1"
    assert "TORCH_COMPILE_DISABLE" not in variables("cpu", compiles=True)


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_only_expandable_segments_are_removed_from_options(name):
    options = "expandable_segments:True,max_split_size_mb:128"
    assert variables("cuda", {name: options})[name] == "max_split_size_mb:128"
    assert variables("cuda", {name: "expandable_segments:True"})[name] == ""
    for fine in ("max_split_size_mb:128", "expandable_segments:False", ""):
        assert name not in variables("cuda", {name: fine})
    assert name not in variables("cpu", {name: options})


def test_variables_are_back_afterwards(monkeypatch):
    monkeypatch.setenv("ROLL_TEST_KEPT", "before")
    monkeypatch.delenv("ROLL_TEST_NEW", raising=False)
    with environment({"ROLL_TEST_KEPT": "meanwhile", "ROLL_TEST_NEW": "meanwhile"}):
        assert os.environ["ROLL_TEST_KEPT"] == os.environ["ROLL_TEST_NEW"] == "meanwhile"
    assert os.environ["ROLL_TEST_KEPT"] == "before"
    assert "ROLL_TEST_NEW" not in os.environ
