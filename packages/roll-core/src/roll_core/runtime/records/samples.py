"""`samples.jsonl`: a few samples of each step as text, for inspection by a person."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from roll_core.runtime.records.jsonlines import LineWriter, copy_lines, up_to

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from roll_core.types import Sample, TokenIds

_METADATA_CHARS = 500
"""Longer metadata strings are truncated to this length."""


class SamplesFile:
    """Writes the first samples of each step: at most `per_step` per split and at most `per_group` per prompt."""

    def __init__(
        self,
        path: Path,
        decode: Callable[[TokenIds], str],
        *,
        per_step: int = 8,
        per_group: int = 4,
        ids: bool = False,
        history: Path | None = None,
        resumed_step: int = 0,
    ) -> None:
        """`decode` converts token ids to text. `ids` records the ids too.

        `history` and `resumed_step` are as for `MetricsFile`.
        """
        if history is not None:
            copy_lines(history, path, up_to(resumed_step))
        self._writer = LineWriter(path)
        self._decode = decode
        self._per_step, self._per_group, self._ids = per_step, per_group, ids
        self._written: dict[str, int] = {}
        self._step = -1

    def write(self, step: int, samples: Sequence[Sample], *, split: str = "train") -> None:
        """Record the first of `samples`. `per_step` limits all calls of a step together, `per_group` each call."""
        if step != self._step:
            self._step, self._written = step, {}
        in_group: dict[str, int] = {}
        for sample in samples:
            if self._written.get(split, 0) >= self._per_step:
                return
            if in_group.get(sample.group_id, 0) >= self._per_group:
                continue
            in_group[sample.group_id] = in_group.get(sample.group_id, 0) + 1
            self._written[split] = self._written.get(split, 0) + 1
            self._writer.write(self._row(step, split, sample))

    def check(self) -> None:
        """Raise `RunFileError` if the file was deleted or replaced."""
        self._writer.check()

    def close(self) -> None:
        """Close the file; may be called more than once."""
        self._writer.close()

    def _row(self, step: int, split: str, sample: Sample) -> dict[str, Any]:
        row: dict[str, Any] = {
            "step": step,
            "split": split,
            "id": sample.id,
            "group": sample.group_id,
            "tag": sample.tag,
            "prompt": self._decode(sample.prompt_ids),
            "response": self._decode(sample.response_ids),
            "finish": sample.finish_reason,
            "prompt_tokens": len(sample.prompt_ids),
            "response_tokens": len(sample.response_ids),
        }
        if sample.reward is not None:
            row["reward"] = sample.reward.value
            if sample.reward.failure:
                row["failure"] = sample.reward.failure
            if sample.reward.detail:
                row["detail"] = dict(sample.reward.detail)
        if sample.versions.size:
            row["version"] = int(sample.versions.max())
        metadata = _short(sample.metadata, row["prompt"])
        if metadata:
            row["metadata"] = metadata
        if self._ids:
            row["prompt_ids"] = sample.prompt_ids.tolist()
            row["response_ids"] = sample.response_ids.tolist()
        return row


def _short(metadata: Mapping[str, Any], prompt: str) -> dict[str, Any]:
    """Metadata columns with numbers or (truncated) strings, without the id and copies of the prompt."""
    found: dict[str, Any] = {}
    for name, value in metadata.items():
        if name == "id" or value == prompt:
            continue
        if isinstance(value, str):
            found[name] = value if len(value) <= _METADATA_CHARS else f"{value[:_METADATA_CHARS]}…"
        elif isinstance(value, (bool, int, float)):
            found[name] = value
    return found
