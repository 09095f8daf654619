"""Batches of rollouts and their lossless JSON: in checkpoints, and in files from which another run trains.

    <run>/rollouts/step-12.jsonl    a line about the batch, then a line for each of its groups, in their order

Arrays are base64 of their little-endian bytes. The first line has the SHA-256 of the lines that follow.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import os
import re
import shutil
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import IO, TYPE_CHECKING, Any, NoReturn

import numpy as np
from typing_extensions import override

from roll_core.data.rollouts import sample_of_rollout
from roll_core.errors import RecordingError, RunDirectoryError, UnsupportedError
from roll_core.runtime.records.tracking import ranges
from roll_core.spec.pipeline import InferRole
from roll_core.types import CompletionOutput, Group, Reward, Rollout, Sample, TurnRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path
    from typing import Self

    from roll_core.spec.config import WorkerConfig
    from roll_core.spec.pipeline import RolloutPlan
    from roll_core.spec.rollout import Prompt
    from roll_core.types import GenerateRequest

SCHEMA = 2
FOLDER = "rollouts"
TOKENS = "<i8"
REPLAYED = "replayed"
"""Key of the state of replayed rollouts, which have no group queues."""
ARRAYS = {"response_ids": "<i8", "logprobs": "<f4", "loss_mask": "|b1", "versions": "<i4"}
OUTPUT_ARRAYS = {"token_ids": "<i8", "logprobs": "<f4", "versions": "<i4"}
TURN_ARRAYS = {"context_ids": "<i8", "sampled_ids": "<i8", "logprobs": "<f4", "versions": "<i4", "loss_mask": "|b1"}
OBSERVED = {"observation_mask": "|b1"}
TURN_VALUES = ("parent", "finish_reason", "reward", "state")


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
    rewards: RewardStats
    """Counts over all groups scored since the last batch, including rejected groups and groups for later batches."""
    passed_over: int = 0
    """Groups that stay in the queue although the batch contains later prompts."""
    restarted: int = 0
    """Groups whose program was restarted in this resumed run, because its state could not be saved."""


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
            rollout_batch_size=sum(plan.counts.values()),
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
        self._folder = run / FOLDER
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
                "tag": group.samples[0].tag,
                "position": position,
                # The prompts of multi-turn rollouts belong to their turns.
                "prompt_ids": saved_array(group.samples[0].prompt_ids, TOKENS) if not group.multi_turn else "",
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
    """The recorded rollouts of a run."""

    def __init__(self, run: Path) -> None:
        """Find the recorded files of a run. Raises `RecordingError` if there are none."""
        self.run = run
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
            groups = [_group(json.loads(line), plan.prompt, path) for line in body.splitlines()]
            facts = _facts_from(head["facts"])
            return RecordedBatch(groups=groups, facts=facts, weight_version=head["weight_version"])


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Convert errors of reading a file to `RecordingError`."""
    try:
        yield
    except RecordingError:
        raise
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise RecordingError(f"{path} cannot be read: {error!r}") from error


def _head(path: Path, stream: IO[bytes]) -> dict[str, Any]:
    head: dict[str, Any] = json.loads(stream.readline())
    if head["schema"] != SCHEMA:
        raise RecordingError(f"{path} has schema {head['schema']!r}, roll-core reads {SCHEMA}: replay with its version")
    return head


def _facts_from(saved: Mapping[str, Any]) -> BatchFacts:
    found = {**saved} | {name: tuple(saved[name]) for name in ("ages", "positions")}
    return BatchFacts(**found | {"rewards": RewardStats(**saved["rewards"])})


def steps_in(run: Path) -> dict[int, Path]:
    """Files of recorded rollouts by step, in ascending order."""
    found = {}
    for file in (run / FOLDER).glob("step-*.jsonl"):
        if named := re.fullmatch(r"step-([1-9][0-9]*)\.jsonl", file.name):
            found[int(named[1])] = file
    return dict(sorted(found.items()))


def _group(line: Mapping[str, Any], prompt: Callable[[str, int], Prompt], path: Path) -> Group:
    expected = prompt(line["tag"], line["position"])
    multi_turn = any("turns" in sample for sample in line["samples"])
    same = multi_turn or np.array_equal(expected.tokens, array_from(line["prompt_ids"], TOKENS))
    if expected.id != line["id"] or not same:
        raise RecordingError(
            f"{path} has responses to prompt {line['id']}, but this run has prompt {expected.id}"
            f"{'' if expected.id != line['id'] else ' with other tokens'} there: replay with the data, tokenizer and"
            " seed of the recorded run"
        )
    return group_from(line, expected)


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
        found = await asyncio.to_thread(self._recording.batch, step + 1, self._plan)
        here = self._role.weight_version
        if found.weight_version != here:
            raise RecordingError(
                f"step {step + 1} of {self._recording.run} was generated after {found.weight_version} optimizer steps,"
                f" but this run has taken {here}: set ppo_epochs, gradient_accumulation_steps and warm-up as in the"
                " recorded run"
            )
        return found.groups, found.facts

    def state(self) -> Mapping[str, Any]:
        """A marker without further state, since the step selects the batch."""
        return {REPLAYED: True}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Ignore the state: the step selects the batch."""


def saved_group(group: Group) -> dict[str, Any]:
    """A group as JSON, without the fields that its prompt already has."""
    baseline = {} if group.baseline is None else {"baseline": _saved_sample(group.baseline)}
    return {"samples": [_saved_sample(each) for each in group.samples]} | baseline


def group_from(saved: Mapping[str, Any], prompt: Prompt) -> Group:
    """Restore a group of `prompt` from the result of `saved_group`."""
    baseline = _sample_from(saved["baseline"], prompt) if "baseline" in saved else None
    return Group(
        id=prompt.id, samples=tuple(_sample_from(each, prompt) for each in saved["samples"]), baseline=baseline
    )


def _saved_sample(sample: Sample) -> dict[str, Any]:
    tokens = _saved_arrays(sample, ARRAYS) if sample.rollout is None else {"turns": _saved_turns(sample.rollout)}
    player = {"player": sample.player} if sample.player else {}
    return {
        "id": sample.id,
        "finish": sample.finish_reason,
        "reward": _saved_reward(sample.reward),
        **player,
        **tokens,
    }


def _sample_from(saved: Mapping[str, Any], prompt: Prompt) -> Sample:
    common: dict[str, Any] = {
        "id": saved["id"],
        "group_id": prompt.id,
        "finish_reason": saved["finish"],
        "tag": prompt.tag,
        "metadata": prompt.metadata,
        "reward": None if saved["reward"] is None else Reward(**saved["reward"]),
    }
    if "turns" in saved:
        return sample_of_rollout(_rollout_from(saved["turns"]), player=saved.get("player", ""), **common)
    return Sample(prompt_ids=prompt.tokens, **common, **_arrays_from(saved, ARRAYS))


def _saved_turns(rollout: Rollout) -> list[dict[str, Any]]:
    return [
        {
            **{name: getattr(turn, name) for name in TURN_VALUES},
            "metrics": dict(turn.metrics),
            **_saved_arrays(turn, TURN_ARRAYS),
            **({} if turn.observation_mask is None else _saved_arrays(turn, OBSERVED)),
        }
        for turn in rollout.turns
    ]


def _rollout_from(saved: Sequence[Mapping[str, Any]]) -> Rollout:
    return Rollout(
        turns=tuple(
            TurnRecord(
                metrics=each["metrics"],
                **{name: each[name] for name in TURN_VALUES},
                **_arrays_from(each, TURN_ARRAYS | (OBSERVED if "observation_mask" in each else {})),
            )
            for each in saved
        )
    )


def saved_outputs(outputs: Sequence[CompletionOutput | None]) -> list[dict[str, Any] | None]:
    """Outputs as JSON; some may be partial or None."""
    return [
        None
        if output is None
        else {"finish": output.finish_reason, "stop": output.stop, **_saved_arrays(output, OUTPUT_ARRAYS)}
        for output in outputs
    ]


def outputs_from(saved: Sequence[Mapping[str, Any] | None]) -> list[CompletionOutput | None]:
    """Restore outputs from the result of `saved_outputs`."""
    return [
        None
        if each is None
        else CompletionOutput(finish_reason=each["finish"], stop=each["stop"], **_arrays_from(each, OUTPUT_ARRAYS))
        for each in saved
    ]


def _saved_reward(reward: Reward | None) -> dict[str, Any] | None:
    if reward is None:
        return None
    return {"value": reward.value, "failure": reward.failure, "detail": dict(reward.detail)}


def _saved_arrays(record: Sample | CompletionOutput | TurnRecord, dtypes: Mapping[str, str]) -> dict[str, Any]:
    """The arrays of a record as JSON, and its routed experts, if it has any."""
    saved: dict[str, Any] = {}
    if (experts := record.routed_experts) is not None:
        dtype = experts.dtype.newbyteorder("<").str
        saved["experts"] = {"dtype": dtype, "shape": list(experts.shape), "data": saved_array(experts, dtype)}
    return saved | {name: saved_array(getattr(record, name), dtype) for name, dtype in dtypes.items()}


def _arrays_from(saved: Mapping[str, Any], dtypes: Mapping[str, str]) -> dict[str, Any]:
    """Restore the fields from the result of `_saved_arrays`."""
    fields = {name: array_from(saved[name], dtype) for name, dtype in dtypes.items()}
    if (experts := saved.get("experts")) is not None:
        fields["routed_experts"] = array_from(experts["data"], experts["dtype"]).reshape(experts["shape"])
    return fields


def saved_array(array: np.ndarray[Any, Any], dtype: str) -> str:
    """The array's bytes as base64."""
    return base64.b64encode(np.ascontiguousarray(array, dtype=dtype).tobytes()).decode()


def array_from(text: str, dtype: str) -> Any:
    """Restore a writable array from the result of `saved_array`."""
    return np.frombuffer(base64.b64decode(text), dtype=dtype).copy()
