"""Batches of rollouts and their lossless JSON: in checkpoints, and in files from which another run trains.

    <run>/rollouts/step-12.jsonl    a line about the batch, then a line for each of its groups, in their order

A record is an object of its fields; an array is a list of its dtype, its shape, and base64 of its little-endian bytes.
The first line has the SHA-256 of the lines that follow.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from typing import IO, TYPE_CHECKING, Any, NoReturn, TypeVar

import numpy as np
from typing_extensions import override

from roll_core.data.rollouts import sample_of_rollout
from roll_core.errors import CheckpointMismatchError, RecordingError, RunDirectoryError, UnsupportedError
from roll_core.runtime.records.media_folder import MediaFolder
from roll_core.runtime.records.tracking import ranges
from roll_core.spec.pipeline import InferRole
from roll_core.types import CompletionOutput, Group, Media, Reward, Rollout, Sample, TurnRecord

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence
    from pathlib import Path
    from typing import Self

    from roll_core.runtime.rollout.requests import Outputs
    from roll_core.spec.config import WorkerConfig
    from roll_core.spec.pipeline import RolloutPlan
    from roll_core.spec.rollout import Prompt
    from roll_core.types import GenerateRequest

SCHEMA = 3
FOLDER = "rollouts"
REPLAYED = "replayed"
"""Key of the state of replayed rollouts, which have no group queues."""
OF_PROMPT = frozenset({"group_id", "prompt_ids", "media", "tag", "metadata"})
"""Fields of a sample that its prompt has."""
OF_TURNS = frozenset({"response_ids", "logprobs", "loss_mask", "versions", "routed_experts"})
"""Fields of a multi-turn sample that follow from its turns."""
TEXTS = frozenset({"id", "group_id", "finish_reason"})
"""Fields without a default of the records below. The others are arrays."""
Record = TypeVar("Record", Sample, CompletionOutput, TurnRecord)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardStats:
    """Numbers of scored samples, and of those that have no reward after the last retry."""

    scored: int = 0
    failed: int = 0
    first_failure: str = ""
    """Reason of the first failed reward."""

    @classmethod
    def of(cls, groups: Sequence[Group]) -> RewardStats:
        """Count the samples of `groups` that were sent to a reward worker."""
        samples = [sample for group in groups for sample in (*group.samples, group.baseline) if sample is not None]
        rewards = [sample.reward for sample in samples if sample.reward is not None]
        failures = [reward.failure for reward in rewards if reward.failed]
        return cls(scored=len(rewards), failed=len(failures), first_failure=failures[0] if failures else "")

    def __add__(self, later: RewardStats) -> RewardStats:
        """Counts of both."""
        return RewardStats(
            scored=self.scored + later.scored,
            failed=self.failed + later.failed,
            first_failure=self.first_failure or later.first_failure,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFacts:
    """Properties of a batch besides its groups."""

    ages: tuple[int, ...]
    """Steps from the start of each group to this batch."""
    left_out: int
    """Groups that the filter rejected since the last batch."""
    stale: int
    """Groups that were restarted since the last batch because they exceeded the staleness bound."""
    surplus: int
    """Groups that stay for the next batch, finished or not."""
    positions: tuple[int, ...]
    """Position of each group's prompt in the order of its tag."""
    tags: tuple[str, ...]
    """That tag, a key of `RolloutPlan.counts`. Of a domain with several tags it is the domain, not the samples' tag."""
    rewards: RewardStats
    """Counts over all groups scored since the last batch, including rejected groups and groups for later batches."""
    passed_over: int = 0
    """Groups that stay in the queue although the batch contains later prompts."""
    restarted: int = 0
    """Groups that this resumed run started again: their program could not be saved, or their prompt has changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTerms:
    """Settings of a recording that a replay must share."""

    rollout_batch_size: int
    num_return_sequences_in_group: int
    temperature: float
    """Sampling temperature of the recorded logprobs."""

    @classmethod
    def of(cls, plan: RolloutPlan) -> Self:
        """The terms of a rollout plan."""
        return cls(
            rollout_batch_size=round(sum(plan.counts.values())),
            num_return_sequences_in_group=plan.n,
            temperature=plan.params.temperature,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedBatch:
    """The recorded training batch of a step."""

    groups: Sequence[Group]
    facts: BatchFacts
    weight_version: int
    """Version of the engine's weights when the batch was complete."""


class Recorder:
    """Writes the rollouts of a run. Files appear once they are complete."""

    def __init__(self, run: Path, *, history: Path | None = None, resumed_step: int = 0) -> None:
        """Write below the directory `run`. A resumed run links the files of `history`, the run that it continues, up to
        `resumed_step`."""
        self._folder, self._media = run / FOLDER, MediaFolder(run)
        self._history, self._resumed_step = history, resumed_step

    def begin(self) -> None:
        """Create the folder and link the files of `history`. Raises `RunDirectoryError`."""
        try:
            self._folder.mkdir(exist_ok=True)
            for step, file in steps_in(self._history).items() if self._history is not None else ():
                if step > self._resumed_step:
                    continue
                try:
                    os.link(file, self._folder / file.name)  # files do not change once they exist
                except OSError:  # another file system, or one without links
                    shutil.copyfile(file, self._folder / file.name)
        except OSError as error:
            raise RunDirectoryError(f"cannot record rollouts in {self._folder}: {error.strerror or error}") from error

    def write(self, step: int, terms: BatchTerms, batch: RecordedBatch) -> None:
        """Write the batch of a step, counted from 1. Blocks; raises `RunDirectoryError`."""
        lines = [
            {
                "id": group.id,
                "tag": tag,
                "position": position,
                # The prompts of multi-turn rollouts belong to their turns.
                "prompt_ids": None if group.multi_turn else saved_array(group.samples[0].prompt_ids),
                "images": [] if group.multi_turn else [image.digest for image in group.samples[0].media],
                **saved_group(group, self._media),
            }
            for group, tag, position in zip(batch.groups, batch.facts.tags, batch.facts.positions, strict=True)
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
    """The recorded rollouts of a run."""

    def __init__(self, run: Path) -> None:
        """Find the recorded files of a run. Raises `RecordingError` if there are none."""
        self.run, self._media = run, MediaFolder(run)
        self.steps = steps_in(run)
        """Recorded file by step."""
        if not self.steps:
            raise RecordingError(
                f"{run} has no recorded rollouts (no {FOLDER}/step-….jsonl): give the directory of a run that had"
                " record_rollouts: true"
            )

    def check(self, terms: BatchTerms, steps: range) -> None:
        """Raise `RecordingError` unless all of `steps` exist and were recorded on the same terms. Reads one line."""
        missing = [step for step in steps if step not in self.steps]
        if missing:
            raise RecordingError(
                f"{self.run} has recorded rollouts of steps {ranges(self.steps)}, but this run needs step {missing[0]}"
            )
        path = self.steps[steps[0] if steps else min(self.steps)]
        with _reading(path), path.open("rb") as stream:
            recorded = _head(path, stream)["terms"]
            for name, mine in asdict(terms).items():
                if mine != recorded[name]:
                    raise RecordingError(f"{path} has {name} {recorded[name]:g}, but this config has {mine:g}")

    def batch(self, step: int, plan: RolloutPlan) -> RecordedBatch:
        """The batch of a step, counted from 1. Blocks.

        Raises `RecordingError` if its prompts are not those of `plan`, or the file is damaged.
        """
        self.check(BatchTerms.of(plan), range(step, step + 1))
        path = self.steps[step]
        with _reading(path), path.open("rb") as stream:
            head, body = _head(path, stream), stream.read()
            if hashlib.sha256(body).hexdigest() != head.get("sha256"):
                raise RecordingError(f"{path} is damaged: its contents do not match their SHA-256; copy the file again")
            groups = [_group(json.loads(line), plan, path, self._media) for line in body.splitlines()]
            facts = _facts_from(head["facts"])
            return RecordedBatch(groups=groups, facts=facts, weight_version=head["weight_version"])


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Convert errors of reading a file to `RecordingError`."""
    try:
        yield
    except RecordingError:
        raise
    except (OSError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise RecordingError(f"{path} cannot be read: {error!r}") from error


def _head(path: Path, stream: IO[bytes]) -> dict[str, Any]:
    head: dict[str, Any] = json.loads(stream.readline())
    if head["schema"] != SCHEMA:
        raise RecordingError(f"{path} has schema {head['schema']!r}, roll-core reads {SCHEMA}: replay with its version")
    return head


def _facts_from(saved: Mapping[str, Any]) -> BatchFacts:
    # Files from before the first release have no tags here; a replay does not read them.
    values = {"tags": (), **saved}
    values |= {name: tuple(values[name]) for name in ("ages", "positions", "tags")}
    return BatchFacts(**values | {"rewards": RewardStats(**saved["rewards"])})


def steps_in(run: Path) -> dict[int, Path]:
    """Files of recorded rollouts by step, in ascending order."""
    files = {}
    for file in (run / FOLDER).glob("step-*.jsonl"):
        if named := re.fullmatch(r"step-([1-9][0-9]*)\.jsonl", file.name):
            files[int(named[1])] = file
    return dict(sorted(files.items()))


def _group(line: Mapping[str, Any], plan: RolloutPlan, path: Path, media: MediaFolder) -> Group:
    if plan.sampled is None:
        expected = plan.prompt(line["tag"], line["position"])
    else:
        try:
            expected = plan.sampled.restore(line["tag"], line["id"])
        except CheckpointMismatchError as error:
            raise RecordingError(f"{path}: {error}") from error
    multi_turn = any("rollout" in sample for sample in line["samples"])
    same = multi_turn or np.array_equal(expected.tokens, array_from(line["prompt_ids"]))
    same &= multi_turn or line.get("images", []) == [image.digest for image in expected.media]
    if expected.id != line["id"] or not same:
        raise RecordingError(
            f"{path} has responses to prompt {line['id']}, but this run has prompt {expected.id}"
            f"{'' if expected.id != line['id'] else ' with other tokens or images'} there: replay with the data,"
            " tokenizer and seed of the recorded run"
        )
    return group_from(line, expected, media)


class ReplayedRole(InferRole):
    """Placeholder for the engine of a replay. Its weight version is the trainer's; it does not generate."""

    def __init__(self, name: str, config: WorkerConfig) -> None:
        self.name, self.config = name, config
        self.weight_version = 0

    @override
    async def generate(self, requests: Sequence[GenerateRequest]) -> NoReturn:
        raise UnsupportedError(f"{self.name} cannot generate: replay_rollouts does not start it")


class Replay:
    """Batches of another run, in the order in which they were recorded."""

    def __init__(self, run: Path, plan: RolloutPlan, role: ReplayedRole) -> None:
        self._recording, self._plan, self._role = Recording(run), plan, role

    async def batch(self, step: int) -> tuple[Sequence[Group], BatchFacts]:
        """The batch that the recorded run trained on after `step` steps. Raises `RecordingError`."""
        recorded = await asyncio.to_thread(self._recording.batch, step + 1, self._plan)
        here = self._role.weight_version
        if recorded.weight_version != here:
            raise RecordingError(
                f"step {step + 1} of {self._recording.run} was generated after {recorded.weight_version} optimizer"
                f" steps, but this run has taken {here}: set ppo_epochs, gradient_accumulation_steps and warm-up as in"
                " the recorded run"
            )
        return recorded.groups, recorded.facts

    def state(self) -> Mapping[str, Any]:
        """A marker without further state, since the step selects the batch."""
        return {REPLAYED: True}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Ignore the state: the step selects the batch."""


def saved_group(group: Group, media: MediaFolder | None = None) -> dict[str, Any]:
    """A group as JSON, without the fields that its prompt already has. `media` stores the images of its turns."""
    baseline = {} if group.baseline is None else {"baseline": _saved_sample(group.baseline, media)}
    return {"samples": [_saved_sample(sample, media) for sample in group.samples]} | baseline


def group_from(saved: Mapping[str, Any], prompt: Prompt, media: MediaFolder | None = None) -> Group:
    """Restore a group of `prompt` from the result of `saved_group`."""
    baseline = _sample_from(saved["baseline"], prompt, media) if "baseline" in saved else None
    samples = tuple(_sample_from(sample, prompt, media) for sample in saved["samples"])
    return Group(id=prompt.id, samples=samples, baseline=baseline)


def _saved_sample(sample: Sample, media: MediaFolder | None) -> Any:
    if sample.rollout is None:
        return _saved(sample, OF_PROMPT)
    values = _saved(sample, OF_PROMPT | OF_TURNS)
    for saved, turn in zip(values["rollout"]["turns"], sample.rollout.turns, strict=True):
        if turn.media:
            saved["media"] = {"images": _needed(media).put(turn.media)}
    return values


def _with_images(turn: Mapping[str, Any], media: MediaFolder | None) -> Mapping[str, Any]:
    return {**turn, "media": _needed(media).get(turn["media"]["images"])} if "media" in turn else turn


def _needed(media: MediaFolder | None) -> MediaFolder:
    if media is None:
        raise AssertionError("turns have images, and there is no folder for them")
    return media


def _sample_from(saved: Mapping[str, Any], prompt: Prompt, media: MediaFolder | None) -> Sample:
    values: dict[str, Any] = {**saved, "group_id": prompt.id, "tag": prompt.tag, "metadata": prompt.metadata}
    if "reward" in values:
        values["reward"] = Reward(**values["reward"])
    if "rollout" not in values:
        return _restored(Sample, values | {"prompt_ids": prompt.tokens, "media": prompt.media})
    turns = [_restored(TurnRecord, _with_images(turn, media)) for turn in values.pop("rollout")["turns"]]
    return sample_of_rollout(Rollout(turns=tuple(turns)), **values)


def saved_outputs(outputs: Outputs) -> list[dict[str, Any] | None]:
    """Outputs as JSON; some may be partial or None."""
    return [_saved(output) for output in outputs]


def outputs_from(saved: Sequence[Mapping[str, Any] | None]) -> list[CompletionOutput | None]:
    """Restore outputs from the result of `saved_outputs`."""
    return [None if output is None else _restored(CompletionOutput, output) for output in saved]


def _saved(value: Any, without: Collection[str] = ()) -> Any:
    """A value as JSON. A record is an object of its fields, except those in `without` and those with their default."""
    if isinstance(value, np.ndarray):
        return saved_array(value)
    if isinstance(value, Media):
        return None  # of a turn: `_saved_sample` stores it
    if is_dataclass(value):
        return {
            field.name: _saved(content)
            for field in fields(value)
            if field.name not in without and (content := getattr(value, field.name)) is not field.default
        }
    if isinstance(value, tuple):
        return [_saved(item) for item in value]
    return dict(value) if isinstance(value, Mapping) else value


def _restored(kind: type[Record], saved: Mapping[str, Any]) -> Record:
    """Restore a record from the result of `_saved`. Raises `KeyError`, `TypeError` or `ValueError` if it is damaged."""
    values: dict[str, Any] = {
        name: array_from(content) if isinstance(content, list) else content for name, content in saved.items()
    }
    for field in fields(kind):
        is_array = field.default is MISSING and field.default_factory is MISSING and field.name not in TEXTS
        if is_array and not isinstance(values[field.name], np.ndarray):
            raise TypeError(f"{field.name} of a {kind.__name__} is not an array")
    return kind(**values)


def saved_array(array: np.ndarray[Any, Any]) -> list[Any]:
    """The array as JSON: numpy's dtype, shape, and base64 of its bytes. No other value of a record is a list."""
    dtype = array.dtype.newbyteorder("<").str
    data = np.ascontiguousarray(array, dtype=dtype).tobytes()
    return [dtype, list(array.shape), base64.b64encode(data).decode()]


def array_from(saved: Sequence[Any]) -> np.ndarray[Any, Any]:
    """Restore a writable array from the result of `saved_array`."""
    dtype, shape, data = saved
    return np.frombuffer(base64.b64decode(data), dtype=dtype).reshape(shape).copy()
