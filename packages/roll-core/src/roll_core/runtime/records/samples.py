"""`samples.jsonl` and `images.jsonl`: a few samples of each step as text or images, for inspection by a person."""

from __future__ import annotations

from base64 import b64encode
from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from roll_core.runtime.records.run_files import LineWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from roll_core.types import Sample, TokenIds, TurnRecord

_PER_STEP = 8
"""Maximum number of samples per step and split."""
_PER_GROUP = 4
_METADATA_CHARS = 500
"""Longer metadata strings are truncated to this length."""


class SamplesFile(LineWriter):
    """Writes the first samples of each step: at most 8 per split and at most 4 per prompt."""

    def __init__(
        self, path: Path, decode: Callable[[TokenIds], str], *, history: Path | None = None, resumed_step: int = 0
    ) -> None:
        """`decode` converts token ids to text. `history` and `resumed_step` are as for `LineWriter`."""
        super().__init__(path, history=history, resumed_step=resumed_step)
        self._decode = decode
        self._written: Counter[str] = Counter()
        self._step = -1

    def write(self, step: int, samples: Sequence[Sample], *, split: str = "train") -> None:
        """Record the first of `samples`. The limit per step covers all calls of a step, that per prompt each call."""
        if step != self._step:
            self._step, self._written = step, Counter()
        in_group: Counter[str] = Counter()
        for sample in samples:
            if self._written[split] >= _PER_STEP:
                return
            if in_group[sample.group_id] < _PER_GROUP:
                in_group[sample.group_id] += 1
                self._written[split] += 1
                self.append(self._row(step, split, sample))

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
        if sample.player:
            row["player"] = sample.player
        if sample.rollout is not None:
            row["turns"] = [
                {
                    "context": self._decode(turn.context_ids),
                    "response": self._decode(turn.sampled_ids),
                    "reward": turn.reward,
                    "finish": turn.finish_reason,
                    "versions": sorted(set(turn.versions.tolist())),
                    **({} if turn.parent == (index - 1 if index else None) else {"parent": turn.parent}),
                    **({} if turn.loss_mask.all() else {"trained": self._trained(turn)}),
                }
                for index, turn in enumerate(sample.rollout.turns)
            ]
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
        return row

    def _trained(self, turn: TurnRecord) -> list[tuple[str, bool]]:
        """Parts of a response, and whether they are in the loss mask."""
        cuts = [0, *(np.flatnonzero(np.diff(turn.loss_mask)) + 1).tolist(), len(turn.sampled_ids)]
        return [
            (self._decode(turn.sampled_ids[begin:end]), bool(turn.loss_mask[begin]))
            for begin, end in pairwise(cuts)
            if begin < end
        ]


class ImagesFile:
    """Writes grids of images, each with captions. The file exists only if there are any."""

    def __init__(self, path: Path, *, history: Path | None = None, resumed_step: int = 0) -> None:
        """`history` and `resumed_step` are as for `LineWriter`."""
        self.path = path
        self._file: LineWriter | None = None
        if history is not None and history.exists():
            self._file = LineWriter(path, history=history, resumed_step=resumed_step)

    def write(self, step: int, images: Sequence[bytes], captions: Sequence[str], *, split: str) -> None:
        """Record one grid of PNG images."""
        self._file = self._file or LineWriter(self.path)
        shown = zip(images, captions, strict=True)
        rows = [{"png": b64encode(png).decode("ascii"), "caption": caption} for png, caption in shown]
        self._file.append({"step": step, "split": split, "images": rows})

    def check(self) -> None:
        """Raise `RunFileError` if the file was deleted or replaced."""
        if self._file is not None:
            self._file.check()

    def close(self) -> None:
        """Close the file; may be called more than once."""
        if self._file is not None:
            self._file.close()


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
