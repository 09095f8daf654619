"""Conformance kit for platforms.

    class TestMine(PlatformConformance):
        name = "mine"

The platform is queried in a process that has not imported torch. Tests that compute are skipped if no hardware is
found.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, ClassVar

import pytest

from roll_core.spec.platform import ROLE_KINDS
from roll_core.spec.providers import PlatformProvider
from roll_testing.packaging import PackagingTests
from roll_testing.platform_programs import KNOWN_DTYPES, UNKNOWN_DTYPE, PlatformReport, ask, compute, fill
from roll_testing.ranks import RankHost, shared_host

if TYPE_CHECKING:
    from collections.abc import Mapping

VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
OF_THE_RUNTIME = {
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "WORKER_NAME", "CLUSTER_NAME"
}  # fmt: skip
"""Variables that identify a worker. Executors set them, together with the visible devices."""
FILLED_BYTES = 256 * 1024**2


class PlatformConformance(PackagingTests):
    """Tests that every platform must pass, with or without its hardware."""

    environment: ClassVar[Mapping[str, str]] = {}
    """Environment variables of the processes that query the platform and compute on it."""

    _kind = PlatformProvider

    @property
    def answers(self) -> PlatformReport:
        """What the platform reports about this host, queried once per class."""
        asked = self._once("answers")
        if not asked:
            asked[()] = self._host().run(ask, self.provider.target, timeout_s=self.timeout_s)[0]
        said: PlatformReport = asked[()]
        return said

    def need_hardware(self) -> None:
        """Skip the test unless the platform's hardware is found."""
        if not self.answers.first.found:
            pytest.skip(f"platform {self.name} is not found: {self.answers.first.why}")

    def test_the_class_has_the_name_of_the_record(self) -> None:
        """The class must have the name of its record. Configs use the record's name, strategies the class's."""
        assert self.answers.name == self.provider.name, (
            f"{self.provider.name} was looked up, but its class has the name {self.answers.name!r}"
        )

    # -- probing -------------------------------------------------------------------------------------------------------

    def test_probing_twice_returns_the_same(self) -> None:
        """Two probes must give the same result, because the hardware does not change in between."""
        assert self.answers.first.found == self.answers.second.found, (
            f"the first probe returned {self.answers.first}, the second {self.answers.second}"
        )

    def test_the_probe_states_a_reason(self) -> None:
        """`probe().why` must be one line that states what was seen, both if hardware was found and if not."""
        why = self.answers.first.why
        if not why.strip() or "\n" in why:
            raise AssertionError(f"probe().why must be one line that states what was found: {why!r}")

    def test_what_is_found_has_slots(self) -> None:
        """A platform that is found must have at least one slot; one that is not found must have none."""
        assert self.answers.first.found == (self.answers.device_count > 0), (
            f"{self.answers.first}, but device_count() is {self.answers.device_count}"
        )

    def test_queries_change_nothing(self) -> None:
        """Querying a platform must not change the environment, the working directory, signal handlers or threads."""
        assert not self.answers.changes, f"querying the platform changed {'; '.join(self.answers.changes)}"

    def test_queries_leave_no_device_open(self) -> None:
        """Querying a platform must leave no device open.

        A device context uses device memory and prevents forking processes. `memory` is not queried here.
        """
        assert not self.answers.opened, f"querying the platform left these open: {', '.join(self.answers.opened)}"

    # -- reported properties -------------------------------------------------------------------------------------------

    def test_its_names_can_be_used(self) -> None:
        """Device type, resource name and collective backend must not be empty. Names of variables must be valid."""
        said = self.answers
        for what in ("device_type", "resource_name", "collective_backend"):
            if not isinstance(getattr(said, what), str) or not getattr(said, what):
                raise AssertionError(f"{what} is {getattr(said, what)!r}, expected a name")
        names = [name for name in (said.visible_devices, *said.also_visible_devices) if name]
        if odd := [name for name in names if not VARIABLE.fullmatch(name)]:
            raise AssertionError(f"{', '.join(map(repr, odd))} is not a valid name of an environment variable")
        assert not said.also_visible_devices or said.visible_devices, (
            "also_visible_devices is set, but visible_devices is empty"
        )

    def test_each_slot_has_its_device(self) -> None:
        """Each slot must have a device of the platform's type, and its own one unless slots share the host's cores."""
        devices = self.answers.devices
        if odd := [device for device in devices if device.partition(":")[0] != self.answers.device_type]:
            raise AssertionError(f"devices {odd} are not of type {self.answers.device_type!r}")
        assert len(set(devices)) >= len(devices) or self.answers.slots_share_cores, (
            f"two slots have the same device: {devices}"
        )

    @pytest.mark.parametrize("kind", ROLE_KINDS)
    def test_variables_are_text_with_a_reason(self, kind: str) -> None:
        """Each environment variable must have a valid name, a string as value and a readable reason.

        None may occur twice.
        """
        variables = self.answers.environment[kind][0]
        for name, value, reason in variables:
            if not isinstance(name, str) or not VARIABLE.fullmatch(name):
                raise AssertionError(f"{name!r} is not a valid name of an environment variable")
            if not isinstance(value, str) or "\0" in value:
                raise AssertionError(f"{name} is {value!r} ({type(value).__name__}), expected text")
            if not isinstance(reason, str) or len(reason.split()) < 3:
                raise AssertionError(f"{name}: the reason is {reason!r}, expected a readable sentence")
        names = [name for name, _, _ in variables]
        assert len(set(names)) >= len(names), f"a variable occurs twice: {names}"

    @pytest.mark.parametrize("kind", ROLE_KINDS)
    def test_variables_of_the_runtime_are_left_to_it(self, kind: str) -> None:
        """A platform must not set variables that executors set: the identity of a worker, and its visible devices."""
        reserved = {*OF_THE_RUNTIME, self.answers.visible_devices, *self.answers.also_visible_devices}
        names = {name for name, _, _ in self.answers.environment[kind][0]}
        if taken := sorted(names & reserved):
            raise AssertionError(f"{', '.join(taken)} are reserved for executors")

    @pytest.mark.parametrize("kind", ROLE_KINDS)
    def test_variables_do_not_depend_on_the_moment(self, kind: str) -> None:
        """Two queries must return the same variables, so that all workers of a role get the same."""
        first, second = self.answers.environment[kind]
        assert first == second, f"environment({kind!r}) returned {first}, and then {second}"

    def test_an_unknown_dtype_is_refused_with_the_way_out(self) -> None:
        """An unknown dtype must be refused with a reason that names a supported one.

        All platforms must support fp32.
        """
        refused, fp32 = self.answers.supports[UNKNOWN_DTYPE], self.answers.supports["fp32"]
        assert not fp32, f"fp32 is refused: {fp32}"
        assert any(dtype in refused for dtype in KNOWN_DTYPES), (
            f"supports({UNKNOWN_DTYPE!r}) is {refused!r}, expected a reason with a supported dtype"
        )

    # -- with the hardware ---------------------------------------------------------------------------------------------

    def test_it_computes_in_what_it_supports(self) -> None:
        """A product of two matrices on the first slot must be correct in each dtype that is not refused."""
        self.need_hardware()
        dtypes = [dtype for dtype in KNOWN_DTYPES if not self.answers.supports[dtype]]
        results = self._host("torch").run(compute, self.provider.target, dtypes, timeout_s=self.timeout_s)[0]
        if wrong := {dtype: value for dtype, value in results.items() if value != 8.0}:
            raise AssertionError(f"1·1 summed over 8 should be 8, but is {wrong}")

    def test_memory_is_counted_in_bytes(self) -> None:
        """`memory` must return integer bytes, with `used` between 0 and `total`.

        Skipped if it raises `UnsupportedError`.
        """
        memory, _ = self._filled(0)
        total, used = memory["total"], memory["used"]
        if type(total) is not int or type(used) is not int or not (0 <= used <= total) or not total > 2**20:
            raise AssertionError(f"memory(0) is {memory}, expected bytes, of which some are used")

    def test_memory_counts_allocations(self) -> None:
        """Allocating 256 MiB must raise the used memory by at least 90 % of that.

        Skipped if slots share the host's memory, or if `memory` raises `UnsupportedError`.
        """
        if self.answers.slots_share_cores:
            pytest.skip("slots have no memory of their own")
        before, after = self._filled(FILLED_BYTES)
        assert after["used"] - before["used"] >= 0.9 * FILLED_BYTES, (
            f"{FILLED_BYTES} bytes were allocated, but memory(0) went from {before} to {after}"
        )

    def _filled(self, num_bytes: int) -> tuple[dict[str, int], dict[str, int]]:
        """Memory of the first slot before and after an allocation; skips the test if it cannot be measured."""
        self.need_hardware()
        measured = self._host("torch").run(fill, self.provider.target, num_bytes, timeout_s=self.timeout_s)[0]
        if isinstance(measured, str):
            pytest.skip(measured)
        before, after = measured
        return before, after

    def _host(self, *preload: str) -> RankHost:
        return shared_host(tuple(sorted(self.environment.items())), preload)
