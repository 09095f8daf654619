"""Errors of libraries and of the machine, caused for real where this machine can, are recognised with their remedy."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import subprocess

import pytest
import torch

from roll_core.errors import ConfigError, ConfigProblem, DataError, ModelError, RollError, WorkerDiedError, WorkerError
from roll_core.plugins.loader import Plugin, load_plugins
from roll_core.plugins.registry import Registry, load_registry
from roll_core.runtime.cluster.executors.base import Failure, Member, located
from roll_core.runtime.run.summary import advise
from roll_core.spec.providers import KnownErrorsProvider
from roll_executor_ray.exit_causes import exit_cause
from roll_testing.errors import mentions

MEMBER = Member(rank=3, host="node7", pid=1, node=0, slots=())


@pytest.fixture(scope="module")
def registry():
    return load_registry()


def caught(act):
    try:
        act()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def in_worker(act, method):
    """As a driver sees it that was sent the failure of a worker's method: the exception itself does not travel."""
    failure = Failure.of(caught(act))
    return located(
        "actor_train", MEMBER, method, Failure(error=None, summary=failure.summary, trace=failure.trace, failed_at=0)
    )


def raising(error):
    def act():
        raise error

    return act


# -- caused for real ---------------------------------------------------------------------------------------------------


def host_memory():
    torch.empty(1 << 60, dtype=torch.uint8)


def host_memory_of_python():
    bytearray(1 << 60)


def full_disk():
    with open("/dev/full", "w") as file:
        file.write("x")


def open_files():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, hard))
        for _ in range(200):
            stack.enter_context(open(os.devnull))


def compiler():
    def refuse(graph, inputs):
        raise RuntimeError("no such kernel")

    torch.compile(lambda x: x + 1, backend=refuse)(torch.ones(1))


def no_device():
    if torch.version.cuda is not None:
        pytest.skip("a torch that was built with CUDA")
    torch.ones(1, device="cuda")


def cuda_home():
    from torch.utils import cpp_extension

    if cpp_extension.CUDA_HOME:
        pytest.skip("there is a CUDA toolkit")
    cpp_extension._join_cuda_home("bin", "nvcc")


def flash_attention():
    from transformers import AutoModelForCausalLM, Qwen3Config

    AutoModelForCausalLM.from_config(Qwen3Config(num_hidden_layers=1), attn_implementation="flash_attention_2")


def no_partner():
    from datetime import timedelta

    torch.distributed.TCPStore("127.0.0.1", 0, world_size=2, is_master=True, timeout=timedelta(seconds=1))


def wrong_build(tmp_path):
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    library = tmp_path / "flash_attn.so"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)],
        input="extern int _ZN3c105Error4failEv(void); int f(void) { return _ZN3c105Error4failEv(); }",
        text=True,
        check=True,
    )
    import ctypes

    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL | os.RTLD_NOW)


@pytest.mark.parametrize(
    ("act", "known"),
    [
        (host_memory, "host_memory"),
        (host_memory_of_python, "host_memory"),
        (full_disk, "disk_full"),
        (open_files, "open_files"),
        (compiler, "backend_compiler_failed"),
        (no_device, "no_device"),
        (cuda_home, "cuda_home"),
        (flash_attention, "flash_attention_missing"),
        (no_partner, "collective_timeout"),
    ],
    ids=lambda each: getattr(each, "__name__", each),
)
def test_errors_caused_here_are_recognised(act, known, registry):
    advice = advise(caught(act), registry)
    assert advice is not None
    assert advice.known.id == known


def test_a_library_of_another_torch_is_recognised(registry, tmp_path):
    advice = advise(caught(lambda: wrong_build(tmp_path)), registry)
    assert advice is not None
    assert advice.known.id == "undefined_symbol"


def test_failed_model_download_keeps_its_message_and_gets_advice(registry, monkeypatch):
    from huggingface_hub import constants

    from roll_core.spec.model import ModelSpec
    from roll_modeling.model import load_config

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    error = caught(lambda: load_config(ModelSpec(path="nobody/nothing-of-this-name")))
    assert isinstance(error, ModelError)
    advice = advise(error, registry)
    assert advice is not None
    assert advice.known.id == "hub_unreachable"


# -- as they were recorded where this machine cannot ------------------------------------------------------------------

RECORDED = {
    "no_kernel_image": "CUDA error: no kernel image is available for execution on the device\nCUDA kernel errors might",
    "driver_too_old": "The NVIDIA driver on your system is too old (found version 11040).",
    "no_device": "No CUDA GPUs are available",
    "cuda_mismatch": "The detected CUDA version (11.8) mismatches the version that was used to compile PyTorch (12.8).",
    "flash_attention_hardware": "FlashAttention only supports Ampere GPUs or newer.",
    "torchvision_build": "operator torchvision::nms does not exist",
    "collective_timeout": "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12)",
    "collective_network": "NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:268, unhandled system error",
    "device_assert": "CUDA error: device-side assert triggered",
    "shared_memory": "unable to allocate shared memory(shm) for file </torch_12_345_0>: No space left on device (28)",
    "ray_start": "Could not find any running Ray instance. Please specify the one to connect to by setting `--address`",
    "hub_gated": "401 Client Error. Cannot access gated repo for url https://huggingface.co/meta-llama/x",
    "vllm_cache": "No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing",
    "vllm_memory_taken": "Free memory on device cuda:0 (10.1/79.1 GiB) on startup is less than desired GPU memory"
    " utilization (0.9, 71.2 GiB). Decrease GPU memory utilization",
    "vllm_start": "Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': 1}",
}


@pytest.mark.parametrize(("known", "message"), RECORDED.items(), ids=RECORDED)
def test_recorded_errors_are_recognised(known, message, registry):
    advice = advise(in_worker(raising(RuntimeError(message)), "start"), registry)
    assert advice is not None
    assert advice.known.id == known


OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a capacity of 79 GiB")


@pytest.mark.parametrize(
    ("method", "known"),
    [
        ("update", "device_memory_in_training"),
        ("score", "device_memory_in_scoring"),
        ("wake", "device_memory_in_rollouts"),
        ("result", "device_memory_in_rollouts"),
        ("start", "device_memory"),
    ],
)
def test_device_out_of_memory_advice_depends_on_the_phase(method, known, registry):
    error = in_worker(raising(OUT_OF_MEMORY), method)
    assert str(error).startswith("actor_train rank 3 on node7: ")
    advice = advise(error, registry)
    assert advice is not None
    assert advice.known.id == known
    assert "first cause" not in advice.told(beside=str(error))


# -- which cause counts ------------------------------------------------------------------------------------------------


def test_first_cause_in_a_worker_trace_is_recognised(registry):
    def act():
        try:
            raise RuntimeError("no kernel image is available for execution on the device")
        except RuntimeError as error:
            raise ValueError("the layer could not be built") from error

    error = in_worker(act, "start")
    advice = advise(error, registry)
    assert advice is not None
    assert advice.known.id == "no_kernel_image"
    assert mentions(advice.told(beside=str(error)), "RuntimeError")


def test_source_lines_of_a_trace_are_no_errors(registry):
    trace = (
        'Traceback (most recent call last):\n  File "x.py", line 1, in f\n    raise OSError("Too many open files")\n'
    )
    trace += "KeyError: 1\n"
    assert advise(WorkerError("r", 0, "h", "start", "KeyError: 1", trace), registry) is None


@pytest.mark.parametrize(
    "error",
    [
        ConfigError([ConfigProblem("a.yaml:1:1", "pretrain", "No space left on device")]),
        DataError("rows.jsonl row 3: 'CUDA out of memory' is no answer"),
        ValueError("something that nobody knows"),
        KeyError(),
    ],
    ids=lambda each: type(each).__name__,
)
def test_mistakes_of_the_users_and_unknown_errors_get_no_advice(error, registry):
    assert advise(error, registry) is None


def test_a_worker_that_the_kernel_killed_for_lack_of_memory(registry):
    cause = exit_cause(RuntimeError(), pid=7, trace="", oom_kills=1)
    advice = advise(WorkerDiedError("actor_infer", 1, "node7", "", cause), registry)
    assert advice is not None
    assert advice.known.id == "host_memory"


def test_program_output_inside_our_error_is_recognised(registry):
    advice = advise(RollError("the worker printed:\nOSError: [Errno 28] No space left on device"), registry)
    assert advice is not None
    assert advice.known.id == "disk_full"


def test_plugin_list_precedes_core_and_broken_list_is_skipped(tmp_path, monkeypatch, caplog):
    (tmp_path / "acme_errors_of_a_test.py").write_text(
        "from roll_core.spec.diagnostics import KnownError\n"
        "KNOWN = (KnownError(id='acme_full', pattern='No space left', cause='Full.', remedy='empty it'),)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    providers = tuple(
        KnownErrorsProvider(name=name, target=f"{name}:KNOWN", summary="Acme's")
        for name in ("acme_errors_of_a_test", "acme_errors_that_are_gone")
    )
    core = load_plugins(environ={"ROLL_PLUGINS": "roll-tools"})
    acme = Plugin(
        package="roll-infer-acme", version="1.0", entry_point="acme", target="acme", state="loaded", providers=providers
    )
    advice = advise(caught(full_disk), Registry([*core, acme]))
    assert advice is not None
    assert advice.known.id == "acme_full"
    assert "acme_errors_that_are_gone" in caplog.text


def test_an_error_that_was_raised_from_itself_is_looked_at_once(registry):
    def act():
        error = OSError(28, "No space left on device")
        raise error from error

    assert "No space left" in advise(caught(act), registry).seen
