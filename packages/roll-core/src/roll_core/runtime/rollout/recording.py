"""The rollouts of a run in files of their own, exactly, from which another run trains without an engine.

    <run>/rollouts/step-12.jsonl    first what the batch was, then a line for each of its groups, in their order

Arrays are base64 of their little-endian bytes. The first line has the SHA-256 of what follows it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from roll_core.errors import RecordingError, RunDirectoryError
from roll_core.runtime.rollout.groups import BatchFacts, Verdicts
from roll_core.runtime.rollout.saved import array_from, group_from, saved_array, saved_group
from roll_core.runtime.tracking import ranges

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path
    from typing import Self

    from roll_core.spec.pipeline import Prompt, RolloutPlan
    from roll_core.types import Group

SCHEMA = 1
FOLDER = "rollouts"
TOKENS = "<i8"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTerms:
    """What a run must have in common with the one whose rollouts it trains on."""

    rollout_batch_size: int
    num_return_sequences_in_group: int
    temperature: float
    """Of the draws: logprobs are those of this temperature."""

    @classmethod
    def of(cls, plan: RolloutPlan) -> Self:
        """Those of a plan."""
        return cls(
            rollout_batch_size=sum(plan.counts.values()),
            num_return_sequences_in_group=plan.n,
            temperature=plan.params.temperature,
        )

    def check(self, recorded: BatchTerms, path: Path) -> None:
        """Raise `RecordingError` where they differ."""
        for name, mine in asdict(self).items():
            theirs = getattr(recorded, name)
            if mine != theirs:
                raise RecordingError(f"{path} was recorded with {name} {theirs:g}, this config has {mine:g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedBatch:
    """A step's rollouts as they were trained on."""

    groups: Sequence[Group]
    facts: BatchFacts
    weight_version: int
    """Of the engine when the batch was complete."""


class Recorder:
    """Writes the rollouts of a run. Each file appears when it is complete."""

    def __init__(self, run: Path, *, history: Path | None = None, resumed_step: int = 0) -> None:
        """Below the directory `run`. A resumed run takes over what the one before, `history`, recorded up to
        `resumed_step`, once it records at all."""
        self._folder = run / FOLDER
        self._history, self._resumed_step = history, resumed_step

    def begin(self) -> None:
        """Make the folder. Raises `RunDirectoryError`."""
        try:
            self._folder.mkdir(exist_ok=True)
            for step, file in steps_in(self._history).items() if self._history is not None else ():
                if step <= self._resumed_step:
                    _take_over(file, self._folder / file.name)
        except OSError as error:
            raise RunDirectoryError(f"cannot record rollouts in {self._folder}: {error.strerror or error}") from error

    def write(self, step: int, terms: BatchTerms, batch: RecordedBatch) -> None:
        """The batch of a step, counted from 1. Blocks; raises `RunDirectoryError`."""
        lines = [
            {
                "id": group.id,
                "tag": group.samples[0].tag,
                "position": position,
                "prompt_ids": saved_array(group.samples[0].prompt_ids, TOKENS),
                **saved_group(group),
            }
            for group, position in zip(batch.groups, batch.facts.positions, strict=True)
        ]
        body = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
        head = {
            "schema": SCHEMA,
            "step": step,
            "sha256": hashlib.sha256(body).hexdigest(),
            "terms": asdict(terms),
            "weight_version": batch.weight_version,
            "facts": asdict(batch.facts),
        }
        path = self._folder / f"step-{step}.jsonl"
        working = path.with_name(f".{path.name}")
        try:
            working.write_bytes(json.dumps(head).encode() + b"\n" + body)
            os.replace(working, path)
        except OSError as error:
            raise RunDirectoryError(f"cannot record the rollouts in {path}: {error.strerror or error}") from error


class Recording:
    """The rollouts that a run recorded."""

    def __init__(self, run: Path) -> None:
        """Raises `RecordingError` where there are none."""
        self.run = run
        self.steps = steps_in(run)
        """Files by step."""
        if not self.steps:
            raise RecordingError(
                f"{run} has no recorded rollouts (no {FOLDER}/step-….jsonl): give the directory of a run that had"
                " record_rollouts: true"
            )

    def check(self, terms: BatchTerms, steps: range) -> None:
        """Raise `RecordingError` unless all of `steps` are there and were recorded on the same terms. Reads one
        line."""
        missing = [step for step in steps if step not in self.steps]
        if missing:
            raise RecordingError(
                f"{self.run} has recorded rollouts of the steps {ranges(self.steps)}; step {missing[0]} is asked for"
            )
        step = steps[0] if steps else min(self.steps)
        terms.check(self._head(step)[0], self.steps[step])

    def batch(self, step: int, plan: RolloutPlan) -> RecordedBatch:
        """The rollouts of a step, counted from 1, whose prompts must be those of `plan`. Blocks.

        Raises `RecordingError` where they are not, and where the file is damaged.
        """
        self.check(BatchTerms.of(plan), range(step, step + 1))
        path = self.steps[step]
        head, body = self._read(path)
        if hashlib.sha256(body).hexdigest() != head.get("sha256"):
            raise RecordingError(f"{path} is damaged: its contents are not those that were recorded")
        try:
            groups = [_group(json.loads(line), plan.prompt, path) for line in body.splitlines()]
            facts = head["facts"]
            return RecordedBatch(
                groups=groups,
                facts=BatchFacts(
                    **facts
                    | {name: tuple(facts[name]) for name in ("ages", "positions")}
                    | {"verdicts": Verdicts(**facts["verdicts"])}
                ),
                weight_version=head["weight_version"],
            )
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, RecordingError):
                raise
            raise RecordingError(f"{path} cannot be read: {error!r}") from error

    def _head(self, step: int) -> tuple[BatchTerms, int]:
        path = self.steps[step]
        head, _ = self._read(path, body=False)
        try:
            return BatchTerms(**head["terms"]), head["weight_version"]
        except (KeyError, TypeError) as error:
            raise RecordingError(f"{path} cannot be read: {error!r}") from error

    def _read(self, path: Path, *, body: bool = True) -> tuple[Mapping[str, Any], bytes]:
        try:
            with path.open("rb") as stream:
                head = json.loads(stream.readline())
                schema = head["schema"]
                rest = stream.read() if body else b""
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RecordingError(f"{path} cannot be read: {error!r}") from error
        if schema != SCHEMA:
            raise RecordingError(
                f"{path} has schema {schema!r}, this roll-core reads {SCHEMA}: replay with the version that recorded it"
            )
        return head, rest


def steps_in(run: Path) -> dict[int, Path]:
    """Files of recorded rollouts by step, in order."""
    found = {}
    for file in (run / FOLDER).glob("step-*.jsonl"):
        if named := re.fullmatch(r"step-([1-9][0-9]*)\.jsonl", file.name):
            found[int(named[1])] = file
    return dict(sorted(found.items()))


def _group(line: Mapping[str, Any], prompt: Callable[[str, int], Prompt], path: Path) -> Group:
    asked = prompt(line["tag"], line["position"])
    if asked.id != line["id"] or not np.array_equal(asked.tokens, array_from(line["prompt_ids"], TOKENS)):
        raise RecordingError(
            f"{path} answers prompt {line['id']}, where this run has {asked.id}"
            f"{'' if asked.id != line['id'] else ' with other tokens'}: replay with the data, the tokenizer and the"
            " seed of the recorded run"
        )
    return group_from(line, asked)


def _take_over(file: Path, target: Path) -> None:
    """Files do not change once they are there, so that two runs may have one in common."""
    try:
        os.link(file, target)
    except OSError:  # another file system, or one without links
        shutil.copyfile(file, target)
