"""Test group *contract*: order of calls, refused calls, and declared capabilities of train strategies."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, get_args

import numpy as np

from roll_core.errors import DataError, RollError, UnsupportedError
from roll_core.plugins.targets import schema_of
from roll_core.spec.config import StrategyConfig
from roll_core.spec.providers import ModelParallelism
from roll_core.spec.train import WantedOutputs
from roll_testing.bench import Step
from roll_testing.bounds import check_names, check_rows, check_same, check_same_run
from roll_testing.losses import LOSSES, SPLITS, TRAINING
from roll_testing.programs import (
    build_undeclared,
    call_before_build,
    close_twice,
    describe_outputs,
    expect,
    fail_to_build,
    list_exports,
    live_together,
    look_between,
    only_score,
    train,
    want_undeclared,
)
from roll_testing.train_kit import TrainKit

if TYPE_CHECKING:
    from pathlib import Path

    from roll_core.spec.providers import Task
    from roll_core.types import Floats
    from roll_testing.bench import Case
    from roll_testing.programs import Rows, Trained

TASKS: tuple[Task, ...] = ("causal_lm", "value", "reward")
SCORES = WantedOutputs(logprobs=True)


class TrainContractTests(TrainKit):
    """Calls in every order in which a run may make them."""

    # -- life cycle ----------------------------------------------------------------------------------------------------

    def test_calls_before_build_raise(self, case: Case, tmp_path: Path) -> None:
        """Every call that needs a model must raise a `RollError` before `build`.

        `close` must never raise, even if called twice.
        """
        (errors,) = self.run(call_before_build, self._trained_on_one(case), self._step(), str(tmp_path))
        for name, error in errors.items():
            closes = name.startswith("close")
            assert not closes or error is None, f"{name} before build raised {error}"
            if not closes:
                expect(error, RollError, f"{name} before build")

    def test_closing_twice_is_fine(self, case: Case, world_size: int) -> None:
        """`close` must be idempotent, because cleanup code may call it more than once."""
        for rank, error in enumerate(self.run(close_twice, case.with_(training=TRAINING), self._step())):
            assert error is None, f"close, called again on rank {rank}, raised {error}"

    def test_a_missing_model_is_named(self, case: Case, tmp_path: Path) -> None:
        """`build` must raise a `RollError` that contains the missing model path. `close` must not raise afterwards."""
        self.need(bool(case.model.path), "a model that is loaded from a path")
        nowhere = str(tmp_path / "no-such-model")
        case = self._trained_on_one(case)
        ((error, closing),) = self.run(fail_to_build, case.with_(model=replace(case.model, path=nowhere)))
        expect(error, RollError, "building a model from a path that does not exist", nowhere)
        assert closing is None, f"close after a failed build raised {closing}"

    def test_a_role_that_only_scores_has_no_optimizer(self, case: Case) -> None:
        """A strategy without training settings must compute correct logprobs.

        Training must raise `UnsupportedError`.
        """
        scores, errors = self.run(only_score, self._on_one(case), self._step(), SCORES)[0]
        check_rows("logprobs", scores["logprobs"], self._reference_scores(case), 1e-4)
        for call, error in errors.items():
            expect(error, UnsupportedError, f"{call} of a role without training settings")

    def test_two_roles_live_in_one_process(self, case: Case) -> None:
        """Two instances in one process must not affect each other: one trains, the other computes logprobs.

        Runs in which every role has one worker may place the roles in one process.
        """
        self.need_training()
        case = self._trained_on_one(case)
        before, after, together = self.run(live_together, case, self._step(), SCORES)[0]
        check_rows("logprobs of the scoring role", before["logprobs"], self._reference_scores(case), 1e-4)
        _same_rows("the scoring role", "the other's step", after, before)
        check_same_run("two roles in one process", together, self.run(train, case, [self._step(), self._step()])[0])

    # -- outputs of a forward pass -------------------------------------------------------------------------------------

    def test_only_what_was_wanted_is_returned(self, case: Case) -> None:
        """`forward` must return exactly the outputs that `WantedOutputs` names.

        Each must be a detached float32 tensor `[T]` with 0 at the first token of each sequence.
        """
        batch = self.batch()
        size = sum(len(sequence) for sequence in batch)
        for want, names in (
            (WantedOutputs(logprobs=True), {"logprobs"}),
            (WantedOutputs(entropy=True), {"entropy"}),
            (WantedOutputs(logprobs=True, entropy=True), {"logprobs", "entropy"}),
        ):
            described = self.run(describe_outputs, self._on_one(case), batch, want)[0]
            check_names(described, dict.fromkeys(names))
            for name, (shape, dtype, gradients, first) in described.items():
                assert (shape, dtype, gradients, first) == ((size,), "float32", False, 0.0), (
                    f"{name}: shape {shape}, {dtype}, {'with' if gradients else 'without'} gradients, up to {first}"
                    f" at first tokens; expected ({size},), float32, without gradients, 0"
                )

    def test_undeclared_features_are_refused(self, case: Case) -> None:
        """Undeclared features must be refused.

        Top-k and logprobs of given ids, if undeclared, and `values` of a language model must raise `UnsupportedError`.
        Building a model for an undeclared task must raise a `RollError`.
        """
        case, batch = self._on_one(case), self.batch()
        if not self.can.topk:
            expect(
                self.run(want_undeclared, case, batch, WantedOutputs(topk=3))[0],
                UnsupportedError,
                "top-k of a forward pass",
            )
        expect(
            self.run(want_undeclared, case, batch, WantedOutputs(values=True))[0],
            UnsupportedError,
            "values of a language model",
        )
        if not self.can.gathered:
            expect(
                self.run(want_undeclared, case, batch, WantedOutputs(gathered=True))[0],
                UnsupportedError,
                "logprobs of given ids",
            )
        for task in TASKS:
            if task not in self.can.tasks:
                expect(self.run(build_undeclared, case, task)[0], RollError, f"building a model of task {task}")

    def test_more_ids_than_the_vocabulary_has_are_refused(self, case: Case) -> None:
        """A number K of top-k or given ids above the vocabulary size must raise `UnsupportedError`.

        A given id outside of the vocabulary must raise `DataError`.
        """
        case, batch, many = self._on_one(case), self.batch(), self.vocab_size + 1
        if self.can.topk:
            expect(self.run(want_undeclared, case, batch, WantedOutputs(topk=many))[0], UnsupportedError, "top-k")
        if self.can.gathered:
            want = WantedOutputs(gathered=True)
            for error, ids in ((UnsupportedError, (0,) * many), (DataError, (self.vocab_size,))):
                with_ids = [
                    replace(sequence, gather_ids=np.tile(np.array(ids), (len(sequence), 1))) for sequence in batch
                ]
                expect(
                    self.run(want_undeclared, case, with_ids, want)[0], error, f"{len(ids)} given ids up to {max(ids)}"
                )

    def test_logprobs_of_a_scalar_head_are_refused(self, case: Case, scalar_task: Task) -> None:
        """A model with a scalar head has no logprobs, so requesting them must raise `UnsupportedError`."""
        expect(self.run(want_undeclared, self._on_one(case), self.batch(), SCORES)[0], UnsupportedError, "logprobs")

    def test_forward_passes_change_nothing(self, case: Case, world_size: int) -> None:
        """Forward passes and exports between backward and the optimizer step must not change the step, bit for bit."""
        self.need_training()
        case = case.with_(training=TRAINING)
        looked = self.run(look_between, case, self._step(), SCORES)[0]
        check_same_run("a step with forward passes in between", looked, self.run(train, case, [self._step()])[0])

    def test_declared_parallelism_is_tested(self) -> None:
        """Every declared kind of parallelism must be tested on at least two ranks.

        `world_sizes` covers data parallelism. For every other kind, `parallelism` must name a variant in this or
        another suite of the strategy. Forward-only strategies need only cover data parallelism.
        """
        assert not self.can.data_parallel or max(self.sizes()) >= 2, (
            f"{self.name} declares data_parallel, but world_sizes is {self.sizes()}; add 2"
        )
        if self.provider.forward_only:
            return
        suites = [type(self), *(suite for suite in _below(TrainContractTests) if suite.name == self.name)]
        for kind in filter(lambda name: getattr(self.can, name), get_args(ModelParallelism)):
            shown = [suite().shows(kind) for suite in suites if kind in suite.parallelism]
            assert shown, (
                f'{self.name} declares {kind}, but no suite tests it; set parallelism = {{"{kind}": <variant>}}'
            )
            if problems := [problem for problem in shown if problem]:
                raise AssertionError(f"{self.name} declares {kind}: {problems[0]}")

    def shows(self, kind: ModelParallelism) -> str:
        """Return why the variant that `parallelism` names does not test this kind, or an empty string if it does."""
        variant = self.parallelism[kind]
        if variant not in self.variants:
            return f"parallelism names {variant!r}, the variants are {', '.join(self.variants)}"
        if max(self.sizes(variant)) < 2:
            return f"variant {variant!r} runs on one rank alone; see ranks_of"
        schema = schema_of(self.provider, StrategyConfig, owner=self.name)
        sizes = schema.model_validate(dict(self.variants[variant])).parallel_sizes()
        if sizes.get(kind, 1) < 2:
            return f"variant {variant!r} has no {kind} above 1: parallel_sizes() of its configuration is {dict(sizes)}"
        return ""

    # -- ranks ---------------------------------------------------------------------------------------------------------

    def test_every_replica_has_one_leader(self, case: Case, world_size: int) -> None:
        """`data_rank` must give each data-parallel index exactly one leader.

        Its size must be the same on every rank.
        """
        self.need_training()
        places = [answer.data_rank for answer in self.run(train, case.with_(training=TRAINING), [self._step()])]
        sizes = {place.size for place in places}
        leaders = sorted(place.index for place in places if place.leader)
        if len(sizes) != 1 or leaders != list(range(places[0].size)):
            raise AssertionError(f"the data ranks of {world_size} ranks do not fit together: {places}")

    def test_all_ranks_have_the_same_weights(self, case: Case, several: int) -> None:
        """After a step, all leaders must export identical bits.

        All ranks must report the same gradient norm and learning rate.
        """
        self.need_training()
        answers: tuple[Trained, ...] = self.run(train, case.with_(training=TRAINING), [self._step()])
        for rank, answer in enumerate(answers):
            assert answer.stats == answers[0].stats, (
                f"rank {rank} reports {answer.stats[0]}, rank 0 {answers[0].stats[0]}"
            )
            if answer.data_rank.leader:
                check_same(f"weights of rank {rank}", answer.after, answers[0].after)

    def test_exports_keep_names_and_order(self, case: Case, world_size: int) -> None:
        """`export_weights` must yield detached tensors with the reference's names and shapes, each name once.

        The order must be the same before and after a step. A tied parameter may appear under each of its names.
        """
        self.need_training()
        reference = self.reference(case)
        for before, after in self.run(list_exports, case.with_(training=TRAINING), self._step()):
            assert before == after, "the export after a step differs in names, shapes or order from the one before"
            names = [name for name, _, _ in after]
            assert len(set(names)) >= len(names), "a name is exported twice"
            known = [name for name in names if name in reference.parameters or name not in reference.aliases()]
            check_names(dict.fromkeys(known), reference.parameters)
            for name, shape, gradients in after:
                assert not gradients, f"{name} is exported with gradients: detach it"
                assert name not in reference.parameters or shape == tuple(reference.parameters[name].shape), (
                    f"{name} has shape {shape}, expected {tuple(reference.parameters[name].shape)}"
                )

    # -- helpers -------------------------------------------------------------------------------------------------------

    def _step(self) -> Step:
        return Step(sequences=self.batch(), loss=LOSSES["sft"], split=SPLITS["three at a time"])

    def _trained_on_one(self, case: Case) -> Case:
        return self._on_one(case).with_(training=None if self.provider.forward_only else TRAINING)

    def _reference_scores(self, case: Case) -> dict[str, Floats]:
        return self.reference(case).by_sequence(self.batch(), SCORES)["logprobs"]


def _same_rows(whose: str, event: str, actual: Rows, expected: Rows) -> None:
    for name, rows in expected.items():
        check_rows(f"{name} of {whose} after {event}", actual[name], rows, 0.0)


def _below(kind: type[TrainContractTests]) -> list[type[TrainContractTests]]:
    """Return all subclasses defined so far, direct and indirect."""
    subclasses: list[type[TrainContractTests]] = []
    for subclass in kind.__subclasses__():
        subclasses += [subclass, *_below(subclass)]
    return subclasses
