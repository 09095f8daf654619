"""Platforms with one deliberate mistake each, and the right one that they come from."""

import itertools
import os
import threading

from roll_core.errors import UnsupportedError
from roll_core.spec.platform import EnvVar, Platform, Probe

OPEN = []
CACHE = EnvVar(name="BOARD_CACHE", value="1", reason="without it a board is slow")


class RightPlatform(Platform):
    """One slot, in the host's memory."""

    name = "right_platform"
    device_type = "cpu"
    resource_name = "BOARD"
    visible_devices = "BOARD_VISIBLE_DEVICES"
    collective_backend = "gloo"
    slots_share_cores = True

    def probe(self):
        return Probe(found=True, why="one board is in the slot")

    def device_count(self):
        return 1

    def device(self, local_index):
        return "cpu"

    def supports(self, dtype):
        return "" if dtype in ("fp32", "bf16") else f"{dtype} does not work: use fp32 or bf16"

    def environment(self, kind, local_indices):
        return () if kind == "reward" else (CACHE,)

    def memory(self, local_index):
        return {"total": 1 << 30, "used": 1 << 20}


class OtherName(RightPlatform):
    name = "somebody_else"


class Fickle(RightPlatform):
    name = "fickle"
    probes = itertools.count()

    def probe(self):
        return Probe(found=next(self.probes) % 2 == 0, why="sometimes")


class Silent(RightPlatform):
    name = "silent"

    def probe(self):
        return Probe(found=True, why="")


class FoundNothing(RightPlatform):
    name = "found_nothing"

    def device_count(self):
        return 0


class SetsVariables(RightPlatform):
    name = "sets_variables"

    def probe(self):
        os.environ["BOARD_WAS_PROBED"] = "1"
        return super().probe()


class StartsThreads(RightPlatform):
    name = "starts_threads"

    def device_count(self):
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        return 1


class KeepsDevicesOpen(RightPlatform):
    name = "keeps_devices_open"

    def probe(self):
        OPEN.append(os.open("/dev/zero", os.O_RDONLY))
        return super().probe()


class OtherType(RightPlatform):
    name = "other_type"

    def device(self, local_index):
        return "board:0"


class OneForAll(RightPlatform):
    name = "one_for_all"
    slots_share_cores = False

    def device_count(self):
        return 2


class NumbersAsValues(RightPlatform):
    name = "numbers_as_values"

    def environment(self, kind, local_indices):
        return (EnvVar(name="BOARD_CACHE", value=1, reason="without it a board is slow"),)


class WithoutReason(RightPlatform):
    name = "without_reason"

    def environment(self, kind, local_indices):
        return (EnvVar(name="BOARD_CACHE", value="1", reason=""),)


class DealsOutRanks(RightPlatform):
    name = "deals_out_ranks"

    def environment(self, kind, local_indices):
        return (EnvVar(name="BOARD_VISIBLE_DEVICES", value="0", reason="a worker sees its own board"),)


class OfTheMoment(RightPlatform):
    name = "of_the_moment"
    moments = itertools.count()

    def environment(self, kind, local_indices):
        return (EnvVar(name="BOARD_PORT", value=str(next(self.moments)), reason="each worker has its own"),)


class TakesEveryDtype(RightPlatform):
    name = "takes_every_dtype"

    def supports(self, dtype):
        return ""


class UsesMoreThanThereIs(RightPlatform):
    name = "uses_more_than_there_is"

    def memory(self, local_index):
        return {"total": 1 << 30, "used": 1 << 31}


class Unnamed(RightPlatform):
    name = "unnamed"
    collective_backend = ""


class Unmeasured(RightPlatform):
    """Right: the contract lets a platform refuse to measure memory."""

    name = "unmeasured"
    slots_share_cores = False

    def memory(self, local_index):
        raise UnsupportedError("boards have no counter")
