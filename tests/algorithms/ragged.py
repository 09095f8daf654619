"""A random ragged batch, flat as here and padded as in other frameworks, for comparisons of numbers and gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from roll_core.algorithms.losses import policy_objective
from roll_core.data.pack import count_totals, pack
from roll_core.spec.algorithms import AdvantageInput, PolicyLossParams
from roll_core.spec.train import MicroBatch, TokenOutputs
from roll_core.types import TrainSequence

PROMPT = 2
"""Prompt tokens of each row."""


@dataclass(frozen=True)
class Ragged:
    """Rows of responses with unmasked tokens within, and random numbers for every token of the padded matrix."""

    mask: torch.Tensor
    """bool `[rows, longest]`; padding is false, too."""
    lengths: tuple[int, ...]
    groups: tuple[int, ...]
    fields: dict[str, torch.Tensor]
    """`logprobs`, `old`, `engine`, `ref`, `advantages`, `values`, `returns` of each token."""
    scores: torch.Tensor

    @classmethod
    def of(cls, seed: int, *, rows: int = 6, group: int = 3, longest: int = 9, spread: float = 0.4) -> Ragged:
        """`spread` scales the logarithms of ratios."""
        rng = np.random.default_rng(seed)
        lengths = [int(each) for each in rng.integers(1, longest + 1, rows)]
        lengths[0] = longest
        shape = (rows, longest)
        mask = rng.random(shape) < 0.8
        mask[:, 0] = True
        for row, length in enumerate(lengths):
            mask[row, length:] = False

        def noise(scale: float = 1.0) -> torch.Tensor:
            return torch.from_numpy(scale * rng.normal(size=shape)).float()

        logprobs = -torch.from_numpy(rng.random(shape) * 3 + 0.02).float()
        old = logprobs + noise(spread)
        return cls(
            mask=torch.from_numpy(mask),
            lengths=tuple(lengths),
            groups=tuple(row // group for row in range(rows)),
            fields={
                "logprobs": logprobs,
                "old": old.clamp(max=-1e-3),
                "engine": (old + noise(spread)).clamp(max=-1e-3),
                "ref": logprobs + noise(),
                "advantages": noise(),
                "values": noise(),
                "returns": noise(),
            },
            scores=torch.from_numpy(rng.normal(size=rows)).float(),
        )

    def with_row_advantages(self) -> Ragged:
        """One advantage for all tokens of a row."""
        fields = self.fields | {"advantages": self.scores[:, None].expand(self.mask.shape).clone()}
        return Ragged(self.mask, self.lengths, self.groups, fields, self.scores)

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__.get("fields", {}):
            return self.fields[name]
        raise AttributeError(name)

    def flat(self, padded: torch.Tensor) -> torch.Tensor:
        """Values of the tokens of all rows, with zeros for the prompts, `[T]`."""
        rows = [torch.cat([torch.zeros(PROMPT), padded[row, :n].float()]) for row, n in enumerate(self.lengths)]
        return torch.cat(rows)

    def padded(self, flat: torch.Tensor) -> torch.Tensor:
        """The matrix of a flat tensor, with zeros as padding."""
        matrix = torch.zeros(self.mask.shape, dtype=flat.dtype)
        for row, each in enumerate(flat.split([PROMPT + n for n in self.lengths])):
            matrix[row, : self.lengths[row]] = each[PROMPT:]
        return matrix

    @property
    def sequences(self) -> list[TrainSequence]:
        found = []
        for row, length in enumerate(self.lengths):

            def of(name: str, row: int = row, length: int = length) -> Any:
                return np.concatenate([np.zeros(PROMPT, np.float32), self.fields[name][row, :length].numpy()])

            found.append(
                TrainSequence(
                    id=str(row),
                    tokens=np.zeros(PROMPT + length, np.int64),
                    loss_mask=np.concatenate([np.zeros(PROMPT, bool), self.mask[row, :length].numpy()]),
                    group=self.groups[row],
                    old_logprobs=of("old"),
                    behaviour_logprobs=of("engine"),
                    ref_logprobs=of("ref"),
                    advantages=of("advantages"),
                    returns=of("returns"),
                    values=of("values"),
                )
            )
        return found

    @property
    def micro(self) -> MicroBatch:
        """All rows as one microbatch."""
        (micro,) = pack(self.sequences, totals=count_totals(self.sequences, max_length=self.mask.shape[1]))
        return micro

    @property
    def rollouts(self) -> dict[str, torch.Tensor]:
        """Mask, rollout and group indices as estimators read them."""
        micro = self.micro
        return {
            "mask_T": micro.loss_mask_T,
            "segments_T": micro.segments_T,
            "groups_S": torch.tensor(self.groups, dtype=torch.int64),
        }

    def estimated(self, estimate: Any, *, scores: torch.Tensor | None = None, **given: Any) -> torch.Tensor:
        """Advantages of an estimator as a matrix."""
        batch = AdvantageInput(scores_S=self.scores if scores is None else scores, **self.rollouts, **given)
        return self.padded(estimate(batch).advantages_T)

    @property
    def last(self) -> torch.Tensor:
        """`[rows, longest]`, each row's score at its last masked token."""
        at_last = torch.zeros(self.mask.shape)
        for row, score in enumerate(self.scores):
            at_last[row, int(self.mask[row].nonzero()[-1])] = score
        return at_last

    def loss(self, name: str, *, aggregation: Any = "token-mean", **params: Any) -> tuple[float, torch.Tensor]:
        """Our policy loss, and its gradient as a matrix."""
        objective = policy_objective(
            policy_loss=f"roll_core.algorithms.policy_losses:{name}",
            params=PolicyLossParams(**params),
            aggregation=aggregation,
            entropy_metric=False,
        )
        return self.objective(objective)

    def objective(self, objective: Any, **outputs: Any) -> tuple[float, torch.Tensor]:
        """Any of our objectives of the logprobs, and its gradient as a matrix."""
        logprobs = self.flat(self.fields["logprobs"]).requires_grad_()
        found = objective(TokenOutputs(logprobs_T=logprobs, **outputs), self.micro)
        found.loss.backward()
        return found.loss.item(), self.padded(logprobs.grad)

    def theirs(self, function: Any) -> tuple[float, torch.Tensor]:
        """A loss of the padded logprobs, and its gradient on tokens of the mask."""
        logprobs = self.fields["logprobs"].clone().requires_grad_()
        loss = function(logprobs)
        loss.backward()
        return loss.item(), torch.where(self.mask, logprobs.grad, 0.0)


def assert_same(ours: Any, theirs: Any) -> None:
    """Equal to float32 rounding: a value, a matrix, or a loss with its gradient."""
    if isinstance(ours, tuple):
        assert ours[1].any(), "nothing is compared: the gradient is 0"
        for one, other in zip(ours, theirs, strict=True):
            assert_same(one, other)
        return
    torch.testing.assert_close(
        torch.as_tensor(ours, dtype=torch.float64), torch.as_tensor(theirs, dtype=torch.float64), rtol=2e-5, atol=2e-6
    )
