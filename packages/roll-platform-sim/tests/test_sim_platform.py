"""What the platform reports for the environments of users, and registration with torch."""

import subprocess
import sys

import pytest
from sim_process import ENVIRONMENT, on_devices

from roll_core.errors import UnsupportedError
from roll_platform_sim import settings
from roll_platform_sim.device import EXTENSION
from roll_platform_sim.platform import SimPlatform
from roll_platform_sim.plugin import roll_platforms
from roll_testing.errors import raises_error


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    for name in (settings.DEVICES, settings.VISIBLE, settings.MEMORY_GIB):
        monkeypatch.delenv(name, raising=False)


def test_without_the_variable_there_are_no_devices():
    probe = SimPlatform().probe()
    assert not probe.found
    assert settings.DEVICES in probe.why
    with raises_error(UnsupportedError, "sim:0"):
        SimPlatform().memory(0)


def test_simulated_platform_is_never_the_default():
    (provider,) = roll_platforms()
    assert provider.priority < 0  # the host's cores have 0, and are always found


@pytest.mark.parametrize(("value", "num"), [("0,1", 2), ("3", 1), ("", 0), ("0,9,1", 1), ("1,1", 0)])
def test_visible_devices_count(monkeypatch, value, num):
    monkeypatch.setenv(settings.DEVICES, "4")
    monkeypatch.setenv(settings.VISIBLE, value)
    assert SimPlatform().device_count() == num
    assert SimPlatform().probe().found is (num > 0)


@pytest.mark.parametrize(
    ("variable", "value"),
    [(settings.DEVICES, value) for value in ("-1", "two", "17", "1.0", "")]
    + [(settings.MEMORY_GIB, value) for value in ("0", "-2", "nan", "inf", "2GiB")],
)
def test_wrong_values_are_named(monkeypatch, variable, value):
    monkeypatch.setenv(settings.DEVICES, "1")
    monkeypatch.setenv(variable, value)
    assert variable in SimPlatform().probe().why
    assert SimPlatform().device_count() == 0


@on_devices()
def test_registration_is_idempotent_and_exclusive():
    from roll_platform_sim.device import register

    register("sim")
    with pytest.raises(RuntimeError, match="'sim'"):
        register("npu")


def python(program, **environment):
    environment = {settings.HOST: ENVIRONMENT[settings.HOST], "PATH": "/usr/bin:/bin", **environment}
    return subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def test_devices_take_another_name_and_variables():
    program = (
        "import torch; from roll_platform_sim.device import register;"
        "register('npu', num_devices=4, visible_devices='NPUS', collective_backend='hccl');"
        "x = torch.ones(2, device='npu:1') * 2;"
        "print(torch.npu.device_count(), x.npu().sum().item(), torch.accelerator.current_accelerator(),"
        " 'hccl' in torch.distributed.Backend.backend_list)"
    )
    assert python(program, NPUS="3,1").stdout.split() == ["2", "4.0", "npu", "True"]


def test_torch_has_no_devices_without_the_variable():
    program = "import torch; print(torch.accelerator.current_accelerator())"
    assert python(program).stdout.split() == ["None"]


def test_a_missing_compiler_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv(settings.DEVICES, "1")
    monkeypatch.setenv("CXX", "/no/compiler")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    probe = SimPlatform().probe()
    assert not probe.found
    assert "/no/compiler" in probe.why


def test_failed_compilations_are_logged_and_reported(tmp_path):
    program = (
        "import torch; from roll_platform_sim.platform import SimPlatform;"
        "print(SimPlatform().device_count(), SimPlatform().probe().why)"
    )
    result = python(program, **{settings.DEVICES: "1", "CXX": "false", "TORCH_EXTENSIONS_DIR": str(tmp_path)})
    num, why = result.stdout.strip().split(maxsplit=1)
    assert num == "0"
    assert EXTENSION.name in why
    assert why.split()[-1] in result.stderr
