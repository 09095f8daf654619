"""Causes of a train/infer logprob gap that the recorded tokens show: versions, masks, sampling, and which tokens.

    <run>/logprobs/step-12.jsonl    a line about the batch, then a line for each of its first training rows

A row has the logprobs of engine and trainer for the same tokens. No model is built. Each candidate cause predicts the
gap that would remain without it. The candidate that explains most is named, then the next one on the rest:

    gap ──► candidates ──► largest share is named, its tokens or its shift are taken out ──► rest ──► … ──► noise

N sampled tokens of all rows, L tokens of a row.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from roll_core.errors import RecordingError
from roll_core.runtime.records.run_files import writing

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    import numpy.typing as npt

    from roll_core.types import Bools, Floats, TokenIds

    Doubles = npt.NDArray[np.float64]

FOLDER = "logprobs"
SCHEMA = 1
MAX_ROWS = 64
"""Number of rows that a file has at most."""
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Fields of `SamplingParams` that change logprobs."""
NOISE = {"fp32": 2e-4, "bf16": 0.02, "fp16": 0.005}
"""Mean absolute difference of logprobs that rounding alone may cause, in nats, by the less precise dtype."""
MIN_SHARE = 0.1
"""Smallest share of the whole gap for which a cause is named."""
CONTRAST = 4.0
"""Tokens are a cause only if their mean gap is this many times that of the other tokens."""
MIN_SCANNED = 16
"""Smallest number of tokens on each side of a threshold that is searched: fewer differ by chance."""
BLOCKS = (16, 32, 64, 128)
"""Numbers of tokens in a block of an engine's KV cache."""
ONE_SIDED = 0.97
"""Share of tokens whose engine logprob must be the higher one, for a renormalised distribution."""
FIXES = {
    "versions.stale": "async_generation_ratio: 0, or train_infer_correction",
    "versions.stale_kv": "strategy_config.kv_after_update: recompute (hf_infer), or partial_rollout: false",
    "masks.environment_tokens": "the rollout program's loss_mask: False for tokens that the policy did not sample",
    "masks.missing_logprobs": "the engine's logprobs: one for each sampled token",
    "tokens.first": "look at the last token of the prompt: template and special tokens",
    "tokens.end": "actor_infer.generating_args.min_new_tokens: 0, and equal end tokens on both sides",
    "tokens.after_end": "the loss mask: end at the first end token",
    "tokens.after_image": "the processor of both sides: pixels, number of image tokens, positions",
    "tokens.block": "block_size of the engine's KV cache, and its kernels",
    "tokens.window": "sliding_window, rope_parameters and max_position_embeddings of both models",
    "inputs.truncation": "prompt_length, and the engine's maximum length: equal on both sides",
    "inputs.shift": "the engine's logprobs: one a sampled token",
    "sampling.temperature": "actor_infer.generating_args.temperature, equal on both sides, and logprobs after it",
    "sampling.processed_logprobs": "actor_infer.generating_args: {top_p: 1, top_k: 0, min_p: 0, repetition_penalty: 1}",
    "sampling.repetition_penalty": "actor_infer.generating_args.repetition_penalty: 1",
}
"""Smallest change for each cause, in keys of the config."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """A named cause of the gap."""

    name: str
    """`<branch>.<cause>`, as in docs/mismatch.md."""
    share: float
    """Share of the first gap that it explains, 0 to 1."""
    before: float
    """Gap in nats before this cause is taken out, after all causes named earlier."""
    after: float
    """Gap in nats without it."""
    evidence: str
    """What was measured."""
    fix: str
    """Smallest change, in keys of the config."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Why engine and trainer disagree."""

    gap: float
    """Mean |engine's logprob - trainer's logprob| in nats."""
    noise: float
    """Gap in nats that rounding alone causes."""
    num_tokens: int
    causes: tuple[Cause, ...] = ()
    """In the order in which they were found: the largest share first."""
    not_examined: tuple[str, ...] = ()
    """Branches that could not be examined, and why."""
    notes: tuple[str, ...] = ()
    """Facts about both sides, such as equal digests."""

    @property
    def unexplained(self) -> float:
        """Share of the gap that no cause explains; 0 if the rest is noise."""
        rest = self.causes[-1].after if self.causes else self.gap
        return 0.0 if rest <= self.noise or not self.gap else rest / self.gap

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "unexplained": self.unexplained}

    def summary(self) -> str:
        """One line: the causes and their shares, or that there is none."""
        if self.gap <= self.noise:
            return f"no cause above noise (gap {self.gap:.3g}, noise {self.noise:.3g} nats)"
        named = [f"{cause.name} {cause.share:.0%}" for cause in self.causes] or ["no cause found"]
        return ", ".join(named) + f"; unexplained {self.unexplained:.0%}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobRow:
    """A training row with the logprobs of both sides; every array has its length L."""

    tokens: TokenIds
    sampled: Bools
    """True for tokens whose logprobs are compared."""
    versions: npt.NDArray[np.int32]
    """Weight version that sampled each token; -1 for the prompt and tokens from an environment."""
    engine: Floats
    trainer: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobBatch:
    """Rows of one step, and what their logprobs depend on."""

    rows: tuple[LogprobRow, ...]
    version: int = 0
    """Weight version with which the trainer computed its logprobs."""
    dtype: str = "fp32"
    """The less precise dtype of both sides."""
    sampling: Mapping[str, float] = field(default_factory=dict)
    """`SAMPLING` of the rollouts."""
    end_tokens: tuple[int, ...] = ()
    image_tokens: tuple[int, ...] = ()
    step: int = 0

    def diagnose(self) -> Diagnosis:
        """Name the causes that these tokens show."""
        if not any(row.sampled.any() for row in self.rows):
            return Diagnosis(gap=0.0, noise=0.0, num_tokens=0, not_examined=("no token has logprobs of both sides",))
        return _diagnose(_Tokens.of(self), self)


def command(run: Path, step: int) -> str:
    """The command that examines the logprobs of a step."""
    return f"roll-core doctor mismatch {run} --step {step}"


def write_logprobs(run: Path, batch: LogprobBatch) -> None:
    """Write the first rows of a step below the run directory `run`. Blocks; raises `RunFileError`."""
    head = {field.name: getattr(batch, field.name) for field in fields(batch) if field.name != "rows"}
    rows = [asdict(row) for row in batch.rows[:MAX_ROWS]]
    lines = [{"schema": SCHEMA, **head}, *({name: array.tolist() for name, array in row.items()} for row in rows)]
    path = run / FOLDER / f"step-{batch.step}.jsonl"
    with writing(path):
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def read_logprobs(run: Path, step: int | None = None) -> LogprobBatch:
    """The recorded logprobs of a step, by default of the last one. Raises `RecordingError` if there are none."""
    files = {int(path.stem.removeprefix("step-")): path for path in (run / FOLDER).glob("step-*.jsonl")}
    if not files or step not in (None, *files):
        has = f"has steps {', '.join(map(str, sorted(files)))}" if files else "is empty or missing"
        raise RecordingError(
            f"{run} has no logprobs of {'a step' if step is None else f'step {step}'} ({FOLDER}/ {has}): they are"
            " written when guards.logprob_gap trips, and at each step with record_rollouts: true"
        )
    path = files[max(files) if step is None else step]
    try:
        head, *rows = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
        if head.pop("schema") != SCHEMA:
            raise RecordingError(f"{path} has another schema than {SCHEMA}: read it with its version of roll-core")
        ends, images = tuple(head.pop("end_tokens")), tuple(head.pop("image_tokens"))
        return LogprobBatch(rows=tuple(map(_row, rows)), end_tokens=ends, image_tokens=images, **head)
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise RecordingError(f"{path} cannot be read: {error!r}") from error


def _row(saved: Mapping[str, Any]) -> LogprobRow:
    dtypes = {"tokens": np.int64, "sampled": np.bool_, "versions": np.int32}
    return LogprobRow(**{name: np.asarray(saved[name], dtypes.get(name, np.float32)) for name in ROW_FIELDS})


ROW_FIELDS = tuple(field.name for field in fields(LogprobRow))


# -- what is known about each token ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tokens:
    """The compared tokens of all rows; every array is `[N]`."""

    engine: Doubles
    trainer: Doubles
    trainer_before: Doubles
    """The trainer's logprob of the token before; NaN if that one is not compared."""
    trainer_after: Doubles
    versions: npt.NDArray[np.int64]
    row: npt.NDArray[np.int64]
    position: npt.NDArray[np.int64]
    """Index in the row."""
    turn_begin: npt.NDArray[np.int64]
    """Index in the row of the first token of the response, or of the turn."""
    is_end: Bools
    after_end: Bools
    after_image: Bools
    repeated: Bools
    """True if the same token occurs earlier in the row."""
    after_older: Bools
    """True if an older version sampled an earlier token of the row."""

    @classmethod
    def of(cls, batch: LogprobBatch) -> _Tokens:
        columns: dict[str, list[npt.NDArray[Any]]] = {field.name: [] for field in fields(cls)}
        for index, row in enumerate(batch.rows):
            chosen, position = row.sampled, np.arange(len(row.tokens))
            trainer = np.where(chosen, row.trainer.astype(np.float64), np.nan)
            begins = np.where(chosen & ~np.append(False, chosen[:-1]), position, 0)
            first_use = np.unique(row.tokens, return_index=True, return_inverse=True)
            ends, images = np.isin(row.tokens, batch.end_tokens), np.isin(row.tokens, batch.image_tokens)
            older = chosen & (row.versions != batch.version) & (row.versions >= 0)
            values = {
                "engine": row.engine.astype(np.float64),
                "trainer": trainer,
                "trainer_before": np.append(np.nan, trainer[:-1]),
                "trainer_after": np.append(trainer[1:], np.nan),
                "versions": row.versions.astype(np.int64),
                "row": np.full(len(position), index),
                "position": position,
                "turn_begin": np.maximum.accumulate(begins),
                "is_end": ends,
                "after_end": _earlier(ends),
                "after_image": _earlier(images),
                "repeated": position > first_use[1][first_use[2].reshape(-1)],
                "after_older": _earlier(older),
            }
            for name, value in values.items():
                columns[name].append(value[chosen])
        joined: dict[str, Any] = {name: np.concatenate(parts) for name, parts in columns.items()}
        return cls(**joined)


def _earlier(mask: Bools) -> Bools:
    """True after the first True."""
    return np.append(False, np.logical_or.accumulate(mask)[:-1])


# -- candidates --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A possible cause, with the gap of each token that would remain without it."""

    name: str
    rest: Doubles
    evidence: str
    purity: float = 1.0
    """Share of its tokens that have a gap: a subset that also contains good tokens explains less exactly."""


def _diagnose(tokens: _Tokens, batch: LogprobBatch) -> Diagnosis:
    rest = np.abs(tokens.engine - tokens.trainer)
    gap, noise = float(rest.mean()), NOISE.get(batch.dtype, NOISE["bf16"])
    causes: list[Cause] = []
    while (before := float(rest.mean())) > noise:
        named = {cause.name for cause in causes}
        options = [option for option in _candidates(tokens, batch, rest, noise) if option.name not in named]
        best = max(options, key=lambda option: (before - float(option.rest.mean())) * option.purity, default=None)
        if best is None or before - (after := float(best.rest.mean())) < MIN_SHARE * gap:
            break
        numbers = {"share": (before - after) / gap, "before": before, "after": after}
        causes.append(Cause(name=best.name, evidence=best.evidence, fix=FIXES[best.name], **numbers))
        rest = best.rest
        tokens = replace(tokens, engine=tokens.trainer + np.sign(tokens.engine - tokens.trainer) * rest)
    return Diagnosis(gap=gap, noise=noise, num_tokens=len(rest), causes=tuple(causes))


def _candidates(tokens: _Tokens, batch: LogprobBatch, rest: Doubles, noise: float) -> Iterator[_Candidate]:
    """Every candidate that has tokens on which it can be measured."""
    for name, mask, evidence in _subsets(tokens, batch):
        older = tokens.after_older | (tokens.versions != batch.version)
        others = ~(mask | older) if name.startswith("versions.") and not older.all() else ~mask
        if (candidate := _subset(name, mask, others, rest, noise, evidence)) is not None:
            yield candidate
    scanned = (
        ("tokens.window", tokens.position, "from position"),
        ("inputs.truncation", tokens.turn_begin, "prompts of at least this many tokens:"),
    )
    for name, values, evidence in scanned:  # causes that begin at a threshold of a value
        order, options = np.argsort(values, kind="stable"), []
        for bound in np.unique(values):
            first = int((values < bound).sum())
            if not MIN_SCANNED <= first <= len(values) - MIN_SCANNED:
                continue
            below, above = rest[order[first - MIN_SCANNED : first]], rest[order[first : first + MIN_SCANNED]]
            if above.mean() > CONTRAST * below.mean():  # a jump, not a gap that grows with the position
                options.append(_subset(name, values >= bound, values < bound, rest, noise, f"{evidence} {bound}"))
        if known := [option for option in options if option is not None]:
            yield min(known, key=lambda option: float(option.rest.mean()) / max(option.purity, 1e-9))
    blocks = []
    for size in BLOCKS:  # tokens at one place of each block
        place = tokens.position % size
        sums, counts = np.bincount(place, rest, size), np.bincount(place, minlength=size)
        worst = int((sums / np.maximum(counts, 1)).argmax())
        told = f"position {worst} of each {size}"
        blocks.append(_subset("tokens.block", place == worst, place != worst, rest, noise, told))
    if known := [option for option in blocks if option is not None and option.purity > 0.9]:
        yield min(known, key=lambda option: float(option.rest.mean()))
    yield from _transforms(tokens, batch, rest, noise)


def _subset(name: str, mask: Bools, others: Bools, rest: Doubles, noise: float, evidence: str) -> _Candidate | None:
    """The gap of the tokens of `mask` falls to the mean of the others; None unless it is far above that."""
    if not mask.any() or not others.any():
        return None
    inside, outside = float(rest[mask].mean()), float(rest[others].mean())
    if inside < CONTRAST * outside or inside < noise:
        return None
    purity = float((rest[mask] > max(outside, noise / 2)).mean())
    evidence = f"{evidence}: mean gap {inside:.3g} of {int(mask.sum())} tokens, {outside:.3g} of the others"
    return _Candidate(name, np.where(mask, np.minimum(rest, outside), rest), evidence, purity)


def _subsets(tokens: _Tokens, batch: LogprobBatch) -> Iterator[tuple[str, Bools, str]]:
    """Sets of tokens that may have a gap which the others do not have."""
    older = (tokens.versions != batch.version) & (tokens.versions >= 0)
    ages = ", ".join(str(version) for version in np.unique(tokens.versions[older])[:4])
    after_update = tokens.after_older & ~older
    yield "versions.stale", older, f"sampled by weight version {ages}, scored by {batch.version}"
    yield "versions.stale_kv", after_update, "current weights after tokens of older ones: their keys and values are old"
    yield "masks.environment_tokens", tokens.versions < 0, "in the mask, but not sampled by any weight version"
    yield "masks.missing_logprobs", tokens.engine == 0, "the engine's logprob is exactly 0"
    yield "tokens.first", tokens.position == tokens.turn_begin, "first token of a response or turn"
    yield "tokens.end", tokens.is_end & ~tokens.after_end, "end token"
    yield "tokens.after_end", tokens.after_end, "after an end token"
    yield "tokens.after_image", tokens.after_image, "after an image"


def _transforms(tokens: _Tokens, batch: LogprobBatch, rest: Doubles, noise: float) -> Iterator[_Candidate]:
    """Causes of all tokens: the engine's logprobs are a function of the trainer's."""
    engine, trainer = tokens.engine, tokens.trainer
    difference, many = engine - trainer, len(engine) >= MIN_SCANNED
    if many and np.ptp(trainer) > 10 * noise:
        slope, intercept = np.polyfit(trainer, engine, 1)
        if abs(slope - 1) > 0.02:
            left = np.minimum(rest, np.abs(engine - intercept - slope * trainer))
            sampled = f"sampled at temperature {batch.sampling.get('temperature', 1.0):g}"
            evidence = f"the engine's logprobs are {slope:.2f} times the trainer's, plus {intercept:.2f}; {sampled}"
            yield _Candidate("sampling.temperature", left, evidence)
    for name, other in (("before", tokens.trainer_before), ("after", tokens.trainer_after)):
        left = np.where(np.isnan(other), rest, np.abs(engine - other))
        yield _Candidate("inputs.shift", left, f"the engine's logprobs are those of the token {name}")
    higher = difference > noise / 2
    if many and float((difference > -noise / 2).mean()) >= ONE_SIDED and higher.any():
        top_p = batch.sampling.get("top_p", 1.0)
        others = batch.sampling.get("top_k", 0) > 0 or batch.sampling.get("min_p", 0) > 0
        bound = math.inf if others or top_p == 1 else -math.log(top_p) + noise
        left = np.where(higher & (difference <= bound), np.minimum(rest, noise / 2), rest)
        evidence = f"never below the trainer's: renormalised after top_p {top_p:g}, top_k or min_p"
        yield _Candidate("sampling.processed_logprobs", left, f"the engine's logprobs are {evidence}", purity=0.9)
    repeated = tokens.repeated
    if repeated.any() and not repeated.all() and difference[repeated].mean() < -noise < difference[~repeated].mean():
        fitted = np.empty_like(engine)
        for group in (repeated, ~repeated):
            fitted[group] = np.polyval(np.polyfit(trainer[group], engine[group], int(group.sum() > 16)), trainer[group])
        means = f"{difference[repeated].mean():+.3g}, others: {difference[~repeated].mean():+.3g}"
        left = np.minimum(rest, np.abs(engine - fitted))
        yield _Candidate("sampling.repetition_penalty", left, f"tokens that occurred before: {means}")
