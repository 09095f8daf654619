"""The teachers of a run: they add the support to sequences, and their logprobs or hidden states there.

sequences ─► support (sampled token | the student's K | the teacher's K | whole vocabulary)
          ─► each tag's teacher, in the context of `teacher_prompt` ─► logprobs [L, K], or hidden states [L, H]
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from roll_core.data.encode import Encoder, media_of
from roll_core.data.rows import Row, Rows, messages_of, tools_of
from roll_core.errors import DataError, InvalidCompletionError
from roll_core.pipelines.experience import without_experts
from roll_core.spec.pipeline import ScoredSequences
from roll_core.spec.rollout import Columns
from roll_core.spec.train import WantedOutputs
from roll_core.types import GenerateRequest, SamplingParams
from roll_pipeline_distill.config import LATER_IMAGE
from roll_pipeline_distill.divergences import overlap

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from roll_core.spec.pipeline import Run
    from roll_core.types import Media, Sample, TokenIds, TrainSequence
    from roll_pipeline_distill.config import DistillConfig

T = TypeVar("T")

HEAD = "teacher_head.safetensors"
"""File in the run directory with the teacher's head, for `kd_support: full`."""
TAUGHT = ("gather_ids", "teacher_logprobs", "teacher_hidden")
"""Fields of a sequence that a teacher provides."""


@dataclass(frozen=True, slots=True)
class Source:
    """Row of a sequence: its tag selects the teacher, its columns have the teacher's prompt."""

    tag: str
    where: str
    values: Mapping[str, Any]

    @classmethod
    def of_sample(cls, sample: Sample) -> Source:
        """Source of a rollout."""
        return cls(sample.tag, f"row {sample.group_id.rpartition('/')[0]}", Columns(sample.metadata))

    @classmethod
    def of_row(cls, row: Row) -> Source:
        """Source of a row of the data set."""
        return cls(row.tag, row.where, row.values)


class Teachers:
    """The teachers of a run."""

    def __init__(self, run: Run, config: DistillConfig, sizes: Mapping[str, int | None]) -> None:
        """`sizes` are the numbers of ids of the roles' models, if known."""
        self.config, self.sizes = config, sizes
        self.data = config.actor_train.data_args
        self.encoder = None if config.teacher_prompt is None else Encoder(run.tokenizer, self.data)

    async def setup(self, run: Run) -> None:
        """Write the teacher's head if the student compares over the whole vocabulary."""
        if self.config.kd_support == "full":
            await run.train_role(self.config.teacher_role("")).export_head(run.dir / HEAD)

    async def teach(
        self, run: Run, sequences: Sequence[TrainSequence], sources: Sequence[Source]
    ) -> list[TrainSequence]:
        """Add the support and the logprobs or hidden states of each sequence's teacher."""
        config = self.config
        roles = [config.teacher_role(source.tag) for source in sources]
        for sequence, role in zip(sequences, roles, strict=True):
            self._check_tokens(sequence, "actor_train" if config.teacher_samples else role)
        if config.teacher_samples:
            return [_sampled_from_teacher(sequence) for sequence in sequences]
        want = WantedOutputs(temperature=config.temperature, masked_only=True)
        asked = list(without_experts(sequences))
        if config.kd_support == "student_topk":
            more = max((self._num_more_ids("actor_train", role) for role in roles), default=0)
            mine = await run.train_role("actor_train").score(sequences, replace(want, topk=config.logits_topk + more))
            support = zip(asked, mine.topk_ids or (), roles, strict=True)
            asked = [
                replace(sequence, gather_ids=np.take_along_axis(ids, self._shared(ids, role), 1))
                for sequence, ids, role in support
            ]
            want = replace(want, gathered=True, topk=config.logits_topk)
        elif config.kd_support == "teacher_topk":
            want = replace(want, topk=config.logits_topk)
        elif config.kd_support == "full":
            want = replace(want, hidden=True)
        else:
            asked = [replace(sequence, gather_ids=sequence.tokens[:, None]) for sequence in asked]
            want = replace(want, gathered=True)
        by_role: dict[str, list[int]] = {}
        for index, role in enumerate(roles):
            by_role.setdefault(role, []).append(index)

        overlaps: dict[int, torch.Tensor] = {}

        async def score(role: str, places: Sequence[int]) -> None:
            shown = [self._in_context(asked[index], sources[index]) for index in places]
            more = self._num_more_ids(role, "actor_train") if config.kd_support == "teacher_topk" else 0
            topk = want.topk + more
            if config.served_teachers:
                scored = await _served(run, role, shown, topk=topk)
            else:
                base, ema = config.self_teacher == "base", config.self_teacher == "ema"
                scored = await run.train_role(role).score(shown, replace(want, base=base, ema=ema, topk=topk))
            if more:
                scored = self._of_the_student(scored)
            for row, index in enumerate(places):
                outputs = _TeacherOutputs.of(scored, row, asked[index], shown[row])
                asked[index] = outputs.added_to(asked[index])
                if config.kd_support == "student_topk" and outputs.topk_ids is not None:
                    overlaps[index] = _overlap(asked[index], outputs.topk_ids)

        await asyncio.gather(*(score(role, places) for role, places in by_role.items()))
        if overlaps:
            run.log({"distillation/overlap": float(torch.cat([overlaps[index] for index in sorted(overlaps)]).mean())})
        return [
            replace(sequence, **{name: getattr(taught, name) for name in TAUGHT})
            for sequence, taught in zip(sequences, asked, strict=True)
        ]

    def _num_more_ids(self, role: str, other: str) -> int:
        """Ids of a role's padded vocabulary that another role's lacks; 0 if sizes are unknown."""
        size, other_size = self.sizes.get(role), self.sizes.get(other)
        return 0 if size is None or other_size is None else max(0, size - other_size)

    def _shared(self, ids_TK: Any, role: str) -> Any:
        """Columns of the `logits_topk` first ids of each token that the vocabulary of `role` has."""
        size = self.sizes.get(role)
        lacking_TK = np.zeros(ids_TK.shape, dtype=np.bool_) if size is None else ids_TK >= size
        return np.argsort(lacking_TK, axis=1, kind="stable")[:, : self.config.logits_topk]

    def _of_the_student(self, scored: ScoredSequences) -> ScoredSequences:
        """The teacher's most likely tokens among those that the student's vocabulary has."""
        ids, logprobs = scored.topk_ids or [], scored.topk_logprobs or []
        chosen = [self._shared(ids_of_sequence, "actor_train") for ids_of_sequence in ids]
        return replace(
            scored,
            topk_ids=[np.take_along_axis(row_ids, columns, 1) for row_ids, columns in zip(ids, chosen, strict=True)],
            topk_logprobs=[
                np.take_along_axis(row_logprobs, columns, 1)
                for row_logprobs, columns in zip(logprobs, chosen, strict=True)
            ],
        )

    def _check_tokens(self, sequence: TrainSequence, role: str) -> None:
        """Raise `DataError` for a token that the vocabulary of `role` lacks."""
        size = self.sizes.get(role)
        if size is not None and len(sequence) and int(sequence.tokens.max()) >= size:
            raise DataError(
                f"sequence {sequence.id} has the token {int(sequence.tokens.max())}, but the vocabulary of {role} has"
                f" ids 0 to {size - 1}: models with padded vocabularies agree only on the tokenizer's ids"
            )

    def _in_context(self, sequence: TrainSequence, source: Source) -> TrainSequence:
        """The sequence with the teacher's prompt instead of its own."""
        if self.encoder is None:
            return sequence
        start = prompt_length(sequence)
        if self.encoder.is_media(sequence.tokens[start:]).any():
            raise DataError(LATER_IMAGE.format(source.where))
        prompt, media = self._prompt(source, sequence.media)
        mask = np.concatenate([np.zeros(len(prompt), dtype=np.bool_), sequence.loss_mask[start:]])
        ids = sequence.gather_ids
        if ids is not None:
            ids = np.concatenate([np.zeros((len(prompt), ids.shape[1]), dtype=np.int64), ids[start:]])
        tokens = np.concatenate([prompt, sequence.tokens[start:]])
        return replace(_bare(sequence), tokens=tokens, media=media, loss_mask=mask, gather_ids=ids)

    def _prompt(self, source: Source, media: tuple[Media, ...]) -> tuple[TokenIds, tuple[Media, ...]]:
        """The teacher's prompt, which has the images and videos `media` of the student's prompt, if any."""
        column = self.config.teacher_prompt
        if self.encoder is None or column is None:
            raise AssertionError("the teacher has the student's prompt")
        value = source.values.get(column)
        if not value:
            raise DataError(f"{source.where}: column {column!r} (teacher_prompt) is missing or empty")
        keys: dict[str, str | None] = (
            {"messages": column} if isinstance(value, list) else {"messages": None, "prompt": column}
        )
        values = dict(source.values)
        for kind, named in (("image", self.data.images), ("video", self.data.videos)):
            if some := [item for item in media if item.kind == kind]:
                name = named or f"{kind}s"
                keys[f"{kind}s"], values[name] = name, some
        data = self.data.model_copy(update=keys)
        row = Row(id="", tag=source.tag, where=source.where, values=Columns(values))
        rows = Rows([(source.where, [values])], data)
        messages = self.encoder.load_images(messages_of(row, data, rows, response=False), source.where, row.folder)
        return self.encoder.prompt(messages, source.where, tools_of(row, data, rows))[1], media_of(messages)


async def _served(run: Run, role: str, sequences: Sequence[TrainSequence], *, topk: int) -> ScoredSequences:
    """Logprobs of the sequences' tokens `[L, 1]`, or their `topk` most likely ones, which an engine computes."""
    once = SamplingParams(max_new_tokens=1)
    requests = [
        GenerateRequest(
            id=f"{sequence.id}/teacher",
            prompt_ids=sequence.tokens,
            media=sequence.media,
            params=once,
            prompt_logprobs=True,
            prompt_topk=topk,
        )
        for sequence in sequences
    ]
    completions = await run.infer_role(role).generate(requests)
    if topk:
        tops = _returned(run, role, "prompt_topk", [completion.prompt_topk for completion in completions])
        return ScoredSequences(topk_ids=[top.ids for top in tops], topk_logprobs=[top.logprobs for top in tops])
    logprobs = _returned(run, role, "prompt_logprobs", [completion.prompt_logprobs for completion in completions])
    return ScoredSequences(gathered_logprobs=[values[:, None] for values in logprobs])


def _returned(run: Run, role: str, name: str, results: Sequence[T | None]) -> list[T]:
    """What an engine returned of a prompt. Raises `InvalidCompletionError` if a completion lacks it."""
    present = [result for result in results if result is not None]
    if len(present) < len(results):
        strategy_args = run.config.roles()[role].strategy_args
        strategy = strategy_args.strategy_name if strategy_args is not None else ""
        raise InvalidCompletionError(f"{role}: strategy {strategy} returned no {name}, although it declares it")
    return present


@dataclass(frozen=True, slots=True)
class _TeacherOutputs:
    """A teacher's outputs for a sequence, at the sequence's own positions."""

    topk_ids: Any
    topk_logprobs: Any
    gathered: Any
    hidden: Any

    @classmethod
    def of(cls, scored: ScoredSequences, index: int, sequence: TrainSequence, shown: TrainSequence) -> _TeacherOutputs:
        """Outputs for `shown`, moved to the positions of `sequence`, whose prompt may have another length."""
        more = len(shown) - len(sequence)
        start = prompt_length(sequence)

        def moved(rows: Sequence[Any] | None) -> Any:
            if rows is None:
                return None
            row = rows[index]
            if shown is sequence:
                return row
            return np.concatenate(
                [
                    np.zeros((start, *row.shape[1:]), dtype=row.dtype),
                    row[start + more :],
                ]
            )

        return cls(
            moved(scored.topk_ids), moved(scored.topk_logprobs), moved(scored.gathered_logprobs), moved(scored.hidden)
        )

    def added_to(self, sequence: TrainSequence) -> TrainSequence:
        """The sequence with its support and the teacher's outputs."""
        if self.hidden is not None:
            return replace(sequence, teacher_hidden=self.hidden)
        if self.gathered is not None:
            return replace(sequence, teacher_logprobs=self.gathered)
        return replace(sequence, gather_ids=self.topk_ids, teacher_logprobs=self.topk_logprobs)


def prompt_length(sequence: TrainSequence) -> int:
    """Tokens before the first trained one."""
    return int(sequence.loss_mask.argmax())


def _bare(sequence: TrainSequence) -> TrainSequence:
    """Only id, tokens, images and mask of a sequence."""
    return type(sequence)(
        id=sequence.id,
        tokens=sequence.tokens,
        media=sequence.media,
        loss_mask=sequence.loss_mask,
        group=sequence.group,
    )


def _sampled_from_teacher(sequence: TrainSequence) -> TrainSequence:
    """Sequence whose support is its own tokens, with the logprobs of the engine that sampled them."""
    if sequence.behaviour_logprobs is None:
        raise AssertionError("rollouts of the teacher have its logprobs")
    ids, logprobs = sequence.tokens[:, None], sequence.behaviour_logprobs[:, None]
    return replace(sequence, gather_ids=ids, teacher_logprobs=logprobs)


def _overlap(sequence: TrainSequence, ids: TokenIds) -> torch.Tensor:
    """Share of the support of each trained token that is among `ids` `[L, K]`."""
    if sequence.gather_ids is None:
        raise AssertionError("a sequence without a support")
    mask = sequence.loss_mask
    return overlap(torch.from_numpy(sequence.gather_ids[mask]), torch.from_numpy(ids[mask]))
