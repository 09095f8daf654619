"""Acme's board: a CPU by another name."""

from __future__ import annotations

from collections.abc import Mapping

from roll_core.spec.platform import Platform, Probe


class AcmeBoard(Platform):
    """One slot, computes in fp32 only."""

    name = "acme_board"
    device_type = "cpu"
    resource_name = "CPU"
    visible_devices = ""
    collective_backend = "gloo"

    def probe(self) -> Probe:
        return Probe(found=True, why="Acme's board is everywhere")

    def device_count(self) -> int:
        return 1

    def device(self, local_index: int) -> str:
        return "cpu"

    def supports(self, dtype: str) -> str:
        return "" if dtype == "fp32" else "the board computes in fp32 only: set dtype to fp32"

    def memory(self, local_index: int) -> Mapping[str, int]:
        return {"total": 1 << 30, "used": 0}
