"""`visible_devices` reads what `CUDA_VISIBLE_DEVICES` and its kin say."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll_core.spec.platform import visible_devices


def test_every_device_is_visible_by_default() -> None:
    assert visible_devices(None, 3) == ("0", "1", "2")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("", ()),
        ("-1", ()),
        ("2", ("2",)),
        ("3,1", ("3", "1")),
        (" 0 , 2 ", ("0", "2")),
        ("00,1", ("0", "1")),
        ("0,-1,1", ("0",)),
        ("0,4,1", ("0",)),
        ("1,1", ()),
        ("NoDevFiles", ()),
        ("GPU-8a44,GPU-77", ("GPU-8a44", "GPU-77")),
        ("MIG-5", ("MIG-5",)),
    ],
)
def test_entries_are_read_as_the_drivers_do(value: str, expected: tuple[str, ...]) -> None:
    assert visible_devices(value, 4) == expected


@given(st.lists(st.integers(-2, 70), max_size=9))
def test_numbers_are_read_as_torch_reads_them(numbers: list[int]) -> None:
    """Its own reader is private, but an implementation by somebody else; it does not know how many there are."""
    from torch.cuda import _parse_visible_devices  # type: ignore[attr-defined]

    value = ",".join(map(str, numbers))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "CUDA_VISIBLE_DEVICES", value)
        theirs = _parse_visible_devices()
    assert visible_devices(value, 100) == tuple(map(str, theirs))


@given(st.none() | st.text(max_size=40), st.integers(0, 16))
def test_visible_devices_are_unique_and_in_range(value: str | None, num: int) -> None:
    seen = visible_devices(value, num)
    assert len(set(seen)) == len(seen)
    assert all(int(each) < num for each in seen if each.isdigit())
