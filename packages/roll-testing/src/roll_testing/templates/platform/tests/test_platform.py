"""Devices that are found by their files, and hidden by the variable."""

import pytest
from roll_platform_acme import platform
from roll_platform_acme.platform import VISIBLE, AcmePlatform


@pytest.fixture
def devices(tmp_path, monkeypatch):
    """Three device files."""
    for name in ("acme0", "acme1", "acme2", "acme_control"):
        (tmp_path / name).touch()
    monkeypatch.setattr(platform, "DEV", tmp_path)
    monkeypatch.delenv(VISIBLE, raising=False)


@pytest.mark.usefixtures("devices")
@pytest.mark.parametrize(("value", "num"), [(None, 3), ("0,2", 2), ("1", 1), ("", 0)])
def test_visible_devices_are_counted(value, num, monkeypatch):
    if value is not None:
        monkeypatch.setenv(VISIBLE, value)
    assert AcmePlatform().device_count() == num
    assert AcmePlatform().probe().found == (num > 0)


def test_without_a_device_it_is_not_found(tmp_path, monkeypatch):
    monkeypatch.setattr(platform, "DEV", tmp_path)
    assert not AcmePlatform().probe().found
