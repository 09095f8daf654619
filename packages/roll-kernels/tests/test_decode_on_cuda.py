"""`decode.cu`: its numbers on a stand-in for CUDA, against the processor's kernels; and that nvcc takes it."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from roll_core.errors import ExtensionError
from roll_kernels import decode, extensions
from roll_kernels.decode import CUDA_EXTENSION, DecodeKernels
from roll_testing.errors import raises_error

SOURCE = Path(decode.__file__).with_name("decode.cu")
STAND_IN = Path(__file__).with_name("cuda_on_a_cpu")
DTYPES = [torch.float32, torch.bfloat16]
BOUND = {torch.float32: 1e-5, torch.bfloat16: 2**-7}
"""Of sums in another order, and of one rounding more or less."""


@pytest.fixture(scope="module")
def computed(tmp_path_factory):
    """`decode.cu` as a library for a processor."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++")
    made = tmp_path_factory.mktemp("cuda") / "decode.so"
    flags = ["-std=c++20", "-O2", "-fPIC", "-shared", "-pthread", "-I", str(STAND_IN)]
    subprocess.run([compiler, *flags, "-x", "c++", str(SOURCE), "-o", str(made)], check=True)
    return ctypes.CDLL(str(made))


@pytest.fixture
def kernels(computed, monkeypatch):
    """Both, for the same sizes: those of the processor and those of CUDA."""

    def make(dtype, *, heads=4, kv_heads=2, size=16):
        sizes = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": size}
        host, gpu = (
            DecodeKernels(**sizes, scale=size**-0.5, qk_epsilon=1e-6, dtype=dtype, device=torch.device(name))
            for name in ("cpu", "cuda")
        )
        return host, gpu

    monkeypatch.setattr(
        decode, "cuda_library", lambda: extensions.declare(computed, decode.functions(cuda=True), result=ctypes.c_int)
    )
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda device: None)
    monkeypatch.setattr(decode, "current_stream", lambda device: None)
    return make


def near(found, expected):
    return torch.allclose(found.float(), expected.float(), rtol=BOUND[found.dtype], atol=BOUND[found.dtype])


def test_kernels_launch_on_the_device_of_their_tensors(kernels, monkeypatch):
    selected = []
    monkeypatch.setattr(torch.accelerator, "set_device_index", selected.append)
    monkeypatch.setattr(decode, "current_stream", lambda device: selected.append((device, "stream")))
    for each in kernels(torch.float32):
        each.begin(torch.empty(1, 2, 1, 16), torch.zeros(1, dtype=torch.int64))
    assert selected == [0, (torch.device("cuda"), "stream")]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num", "size"), [(0, 4), (1, 1), (3, 129), (2, 512)])
def test_norms_and_gates_are_those_of_the_processor(kernels, dtype, num, size):
    torch.manual_seed(num)
    host, gpu = kernels(dtype)
    cache = torch.empty(1, 2, 1, 16, dtype=dtype)
    lengths = torch.zeros(1, dtype=torch.int64)
    hidden, added = torch.randn(2, num, size).to(dtype)
    weight, gate_up = torch.randn(size).to(dtype), (40 * torch.randn(num, 2 * size)).to(dtype)
    found = []
    for each in (host, gpu):
        each.begin(cache, lengths)
        mine = hidden.clone()
        found.append((each.add_norm(mine, added, weight, 1e-5), mine, each.add_norm(mine, None, weight, 1e-5)))
        found[-1] += (each.gate(gate_up),)
    assert all(near(mine, theirs) for mine, theirs in zip(*found, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "lengths"),
    [(1, 1, 2, [0]), (6, 2, 18, [0, 127, 5]), (2, 2, 64, [128]), (4, 1, 256, [300, 1]), (1, 1, 512, [3])],
)
def test_attention_is_that_of_the_processor(kernels, dtype, normed, heads, kv_heads, size, lengths):
    """Widths on both sides of a block's threads; heads that take one thread's number, and four."""
    torch.manual_seed(size)
    num, width = len(lengths), max(lengths) + 3
    qkv = torch.randn(num, (heads + 2 * kv_heads) * size).to(dtype)
    caches = torch.randn(2, num, kv_heads, width, size).to(dtype)
    for row, length in enumerate(lengths):
        caches[:, row, :, length:] = torch.nan  # nobody reads what lies beyond
    cos, sin = torch.randn(2, width, 1, size)
    weight = torch.randn(heads + kv_heads, size) if normed else None
    found = []
    for each in kernels(dtype, heads=heads, kv_heads=kv_heads, size=size):
        keys, values = caches.clone()
        each.begin(keys, torch.tensor(lengths))
        out = each.attend(qkv, weight, cos, sin, keys, values)
        found.append((out, keys.nan_to_num(7.0), values.nan_to_num(7.0)))
    assert all(near(mine, theirs) for mine, theirs in zip(*found, strict=True))


def test_a_row_that_is_not_finite_stays_so_and_spoils_no_other(kernels):
    _, gpu = kernels(torch.float32)
    qkv = torch.ones(3, 8 * 16)
    qkv[1, 5] = torch.nan
    keys, values, tables = torch.zeros(3, 2, 4, 16), torch.zeros(3, 2, 4, 16), torch.ones(4, 1, 16)
    gpu.begin(keys, torch.tensor([0, 1, 2]))
    found = gpu.attend(qkv, None, tables, tables, keys, values)
    assert found.isfinite().all(dim=1).tolist() == [True, False, True]


def test_cuda_error_is_raised(kernels):
    _, gpu = kernels(torch.float32, heads=1, kv_heads=1, size=1024)
    keys = torch.zeros(1, 1, 1, 1024)
    gpu.begin(keys, torch.zeros(1, dtype=torch.int64))
    with raises_error(ExtensionError, "roll_attend", "CUDA", "1"):
        gpu.attend(torch.zeros(1, 3 * 1024), None, keys[0, 0], keys[0, 0], keys, keys.clone())


def test_nvcc_compiles_it(tmp_path, monkeypatch):
    """By the builder that users have; for GPUs that need not be here."""
    if torch.version.cuda is None:
        pytest.skip("a torch that was built without CUDA")
    from torch.utils import cpp_extension

    if cpp_extension.CUDA_HOME is None:
        pytest.skip("no nvcc")
    monkeypatch.setenv(extensions.CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setenv(extensions.FORCE_VARIABLE, "1")
    monkeypatch.setenv(extensions.ARCHITECTURES_VARIABLE, "9.0")
    library = ctypes.CDLL(str(CUDA_EXTENSION.library()))
    assert all(hasattr(library, name) for name in ("roll_add_norm", "roll_gate", "roll_attend"))
