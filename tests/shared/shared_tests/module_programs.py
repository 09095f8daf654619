"""Checks of module programs on ranks that share a module: disagreement, failure, and lower precision."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from roll_core.errors import ContractError
from roll_core.plugins.registry import load_registry
from roll_core.spec.providers import TrainProvider
from roll_testing.bench import ModuleStep, accumulate, built, module_outputs
from roll_testing.bounds import check_rows
from roll_testing.losses import TRAINING
from roll_testing.programs import Raised, expect, raised, train
from roll_testing.tiny_flow import FLOW, Euler, FlowMatching, flow_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from roll_core.spec.module_program import ModuleBatch, ProgramModule
    from roll_testing.bench import Case
    from roll_testing.programs import Rows

ROWS = flow_rows(4)
ODD = ROWS[0].id
"""Row that the wrong programs treat differently."""


@dataclass(frozen=True, slots=True)
class OneCallMore:
    """Program and loss that call the module twice for a batch with the row `ODD`, otherwise once."""

    loss: bool = False

    def __call__(self, module: ProgramModule, batch: ModuleBatch) -> Any:
        """Outputs, or a loss."""
        steps = 2 if ODD in batch.ids else 1
        if self.loss:
            Euler(steps=steps)(module, batch)
            return FlowMatching()(module, batch)
        return Euler(steps=steps)(module, batch)


@dataclass(frozen=True, slots=True)
class Fails:
    """Program that raises `KeyError` between two calls of the module, for a batch with the row `ODD`."""

    def __call__(self, module: ProgramModule, batch: ModuleBatch) -> dict[str, Tensor]:
        """Outputs."""
        found = Euler(steps=1)(module, batch)
        if ODD in batch.ids:
            raise KeyError("no such prompt embedding")
        return found | Euler(steps=1)(module, batch)


def disagree(rank: int, case: Case) -> tuple[dict[str, Raised | None], Rows, Rows]:
    """Errors of wrong programs and losses, and outputs of a right program before and after them."""
    with built(case, rank) as strategy:
        before = module_outputs(strategy, ROWS, Euler(), 2)
        found = {
            "one call more": raised(lambda: module_outputs(strategy, ROWS, OneCallMore(), 2)),
            "fails": raised(lambda: module_outputs(strategy, ROWS, Fails(), 2)),
            "a loss with one call more": raised(
                lambda: accumulate(strategy, ModuleStep(rows=ROWS, loss=OneCallMore(loss=True)))
            ),
        }
        return found, before, module_outputs(strategy, ROWS, Euler(), 2)


def check_disagreement(run: Callable[..., Sequence[Any]], case: Case) -> None:
    """Fail unless programs that differ between two ranks raise on both. They must not block."""
    answers = run(disagree, case.with_(model=FLOW, training=TRAINING, world_size=2, devices=("cpu",) * 2))
    kinds = [found["fails"].kinds[0] for found, _, _ in answers]
    assert sorted(kinds) == ["ContractError", "KeyError"], f"a failing program raised {kinds}"
    for rank, (found, before, after) in enumerate(answers):
        for name in ("one call more", "a loss with one call more"):
            expect(found[name], ContractError, f"{name} on rank {rank}")
        check_rows(f"rank {rank} after the errors", after["x"], before["x"], 0.0)


def check_low_precision(run: Callable[..., Sequence[Any]], case: Case, dtype: str, bound: float) -> None:
    """Fail unless gradient norms on two ranks are those of `hf_train` in float32, up to rounding."""
    steps = [ModuleStep(rows=flow_rows(7, seed=seed), loss=FlowMatching(), max_rows=2) for seed in range(2)]
    case = case.with_(model=replace(FLOW, dtype=dtype), training=TRAINING, world_size=2, devices=("cpu",) * 2)
    plain = case.with_(
        model=FLOW, provider=load_registry().find(TrainProvider, "hf_train"), strategy_config={}, world_size=1
    )
    found, expected = run(train, case, steps)[0], run(train, plain, steps)[0]
    for one, other in zip(found.stats, expected.stats, strict=True):
        difference = abs(one.grad_norm / other.grad_norm - 1)
        assert difference <= bound, f"{dtype}: gradient norm {one.grad_norm}, {other.grad_norm} in float32"
