"""Off-policy GRPO on two FSDP2 ranks: the numbers of one rank of `hf_train` on the same stale rollouts."""

from __future__ import annotations

from pathlib import Path

import pytest

from roll_testing.runs import Runs

pytestmark = [pytest.mark.engine, pytest.mark.ray, pytest.mark.timeout(900)]


def test_stale_rollouts_on_ranks_give_the_numbers_of_hf_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    found, expected = Runs(tmp_path, "local").ahead("fsdp2", 2, replicas=2)
    assert len(found) == len(expected) == 3
    assert all(line["actor/logprob_lag"] > 0 for line in found[1:])
    for one, other in zip(found, expected, strict=True):
        assert {name: one[name] for name in other} == pytest.approx(other, rel=1e-3, abs=1e-5)
