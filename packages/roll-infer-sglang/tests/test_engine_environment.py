"""Which environment variables the server's processes get, and when."""

from __future__ import annotations

from roll_infer_sglang.engine_environment import engine_environment
from roll_infer_sglang.registration import HOST_CACHE, INSISTED_ON


def variables(device, present=None, *, num_threads=4, num_slots=1):
    return engine_environment(device, present or {}, num_threads=num_threads, num_slots=num_slots)


def test_the_cpus_engine_is_only_asked_for_on_a_cpu():
    assert variables("cpu")["SGLANG_USE_CPU_ENGINE"] == "1"
    assert variables("cpu")[INSISTED_ON] == "pytorch"
    assert variables("cpu")[HOST_CACHE]
    assert not {"SGLANG_USE_CPU_ENGINE", INSISTED_ON, HOST_CACHE, "OMP_NUM_THREADS"} & variables("cuda").keys()


def test_threads_are_shared_by_the_slots():
    assert variables("cpu", num_threads=8, num_slots=4)["OMP_NUM_THREADS"] == "2"
    assert variables("cpu", num_threads=1, num_slots=2)["OMP_NUM_THREADS"] == "1"


def test_what_the_user_set_stays():
    wanted = variables("cpu")
    assert not variables("cpu", dict.fromkeys(wanted, "mine"), num_threads=0)


def test_growing_segments_are_taken_from_the_allocators_options_alone():
    options = "expandable_segments:True,max_split_size_mb:128"
    assert variables("cuda", {"PYTORCH_CUDA_ALLOC_CONF": options})["PYTORCH_CUDA_ALLOC_CONF"] == "max_split_size_mb:128"
    assert "PYTORCH_CUDA_ALLOC_CONF" not in variables("cuda", {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128"})
