"""Rows, prompts and groups of a batch: shares of domains, order of prompts, and filters of groups (dynamic sampling).

The prompt at a position is a pure function of the position. A resumed run therefore continues with the same prompts.
Those of `SampledOrder` depend on scores; checkpoints have its state.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections import Counter, defaultdict
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from typing_extensions import override

from roll_core.algorithms.normalise import moments_by
from roll_core.errors import CheckpointMismatchError, ContractError, DataError
from roll_core.runtime.rollout.requests import stable_seed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import numpy.typing as npt

    from roll_core.spec.config import QueryFilterConfig, RewardConfig
    from roll_core.spec.rollout import Prompt, PromptSampler
    from roll_core.types import Group


log = logging.getLogger(__name__)


class RowOrder:
    """Endless seeded order of `num_rows` rows, with a new permutation in each epoch.

    Row `i` of the order is a pure function of `(num_rows, seed, i)`, so a resumed run continues exactly where the
    interrupted run stopped. A batch may span two epochs. Every epoch contains each row exactly once. Raises `DataError`
    for fewer than one row.
    """

    def __init__(self, num_rows: int, seed: int, *, shuffle: bool = True) -> None:
        if num_rows < 1:
            raise DataError("there are no rows to order: the data are empty, or all rows were dropped")
        self.num_rows, self.seed, self.shuffle = num_rows, seed, shuffle

    def batch(self, step: int, size: int) -> list[int]:
        """Rows of batch `step` (from 0), if every batch has `size` rows."""
        return [self.row(position) for position in range(step * size, (step + 1) * size)]

    def row(self, position: int) -> int:
        """Row at a position of the endless order."""
        epoch, index = divmod(position, self.num_rows)
        return int(_permutation(self.num_rows, self.seed, epoch)[index]) if self.shuffle else index


@lru_cache(maxsize=16)
def _permutation(num_rows: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    return np.random.default_rng([seed, epoch]).permutation(num_rows)


class PromptOrder:
    """Prompts of a run. `counts` is the mean number of prompts per tag in a batch of `size`, of the first step if the
    shares change."""

    schedule: Mapping[int, Mapping[str, float]] = {}
    """Shares by step; empty if they do not change."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        *,
        size: int,
        shares: Mapping[str, float],
        seed: int,
        domains: Mapping[str, str] | None = None,
        schedule: Mapping[int, Mapping[str, float]] | None = None,
    ) -> None:
        """`shares` maps tags, or the `domains` that tags belong to, to their share of a batch. `schedule` has shares by
        step, and replaces it.

        If `shares` is empty, each tag's share is proportional to its rows. Otherwise rows without a share are not used,
        and a warning counts them. Raises `DataError` for a share without rows.
        """
        self.size, self.schedule = size, schedule or {}
        key = "domain_interleave_schedule" if schedule else "domain_interleave_probs"
        if schedule:
            maxima: Counter[str] = Counter()
            for scheduled in schedule.values():
                maxima |= Counter(scheduled)
            shares = maxima
        by_tag: defaultdict[str, list[Prompt]] = defaultdict(list)
        for prompt in prompts:
            domain = (domains or {}).get(prompt.tag, prompt.tag)
            by_tag[domain if prompt.tag not in shares and domain in shares else prompt.tag].append(prompt)
        missing = [tag for tag, share in shares.items() if share > 0 and tag not in by_tag]
        if missing:
            raise DataError(
                f"{key} names {missing[0]!r}, but no row has that tag; there are"
                f" {', '.join(repr(tag) for tag in sorted(by_tag))}"
            )
        if unused := sorted(set(by_tag).difference(shares)) if shares else []:
            number = sum(len(by_tag[tag]) for tag in unused)
            log.warning(
                "%s has no share for %s: %d of %d rows are not used",
                key,
                ", ".join(map(repr, unused)),
                number,
                len(prompts),
            )
        weights = shares or {tag: float(len(rows)) for tag, rows in by_tag.items()}
        self.counts = mean_counts(size, weights)
        if schedule:
            self.counts = self.counts_at(0)
        self.rows = {tag: by_tag[tag] for tag in self.counts}
        self.orders = {
            tag: RowOrder(len(rows), seed=stable_seed(seed, "domain", tag)) for tag, rows in self.rows.items()
        }

    def counts_at(self, step: int) -> dict[str, float]:
        """Mean number of prompts per tag in the batch of a step, from 0. Shares are linear between scheduled steps."""
        if not self.schedule:
            return self.counts
        steps = sorted(self.schedule)
        by_step = [mean_counts(self.size, self.schedule[scheduled]) for scheduled in steps]
        counts = {tag: [counts.get(tag, 0.0) for counts in by_step] for tag in self.counts}
        return {tag: float(np.interp(step, steps, numbers)) for tag, numbers in counts.items()}

    def prompt(self, tag: str, position: int) -> Prompt:
        """Prompt at a position, from 0, of the endless sequence of a tag's rows. Ids are unique: `<row>/<epoch>`."""
        rows = self.rows[tag]
        prompt = rows[self.orders[tag].row(position)]
        return replace(prompt, id=f"{prompt.id}/{position // len(rows)}", row=prompt.id)


class SampledOrder(PromptOrder):
    """Prompts whose rows a sampler chooses, by tag. See `roll_core.spec.pipeline.SampledPrompts`."""

    def __init__(
        self, create: Callable[[], PromptSampler], prompts: Sequence[Prompt], *, seed: int, **options: Any
    ) -> None:
        """`create` creates the sampler of a tag. Other arguments are those of `PromptOrder`."""
        super().__init__(prompts, seed=seed, **options)
        self.samplers = {tag: create() for tag in self.rows}
        for tag, sampler in self.samplers.items():
            sampler.start(self.rows[tag], stable_seed(seed, "domain", tag))
        self.times: dict[str, Counter[int]] = {tag: Counter() for tag in self.rows}
        """How often each row was chosen. Ids of its prompts are `<row>/<number>`."""
        self._indices = {tag: {row.id: index for index, row in enumerate(rows)} for tag, rows in self.rows.items()}

    @override
    def prompt(self, tag: str, position: int) -> Prompt:
        """Prompt at the next position. Raises `ContractError` if the sampler returns no index of a row."""
        row, sampler = self.samplers[tag].choose(position), type(self.samplers[tag]).__name__
        if not isinstance(row, int | np.integer) or not 0 <= row < len(self.rows[tag]):
            raise ContractError(
                f"prompt_sampler: {sampler}.choose returned {row!r}, expected an index below {len(self.rows[tag])}"
            )
        prompt, times = self.rows[tag][row], self.times[tag]
        times[int(row)] += 1
        return replace(prompt, id=f"{prompt.id}/{times[int(row)] - 1}", row=prompt.id)

    def observe(self, tag: str, group: Group) -> None:
        """See `SampledPrompts`."""
        scores = [s.reward.value for s in group.samples if s.reward is not None and s.reward.value is not None]
        self.samplers[tag].observe(self._indices[tag][group.id.rpartition("/")[0]], scores)

    def restore(self, tag: str, id: str) -> Prompt:
        """See `SampledPrompts`."""
        row = id.rpartition("/")[0]
        if row not in self._indices.get(tag, ()):
            raise CheckpointMismatchError(f"prompt {id} is none of the rows of this run: give it the rows of that run")
        return replace(self.rows[tag][self._indices[tag][row]], id=id, row=row)

    def state(self, tag: str) -> dict[str, Any]:
        """See `SampledPrompts`."""
        times = [[row, number] for row, number in self.times[tag].items()]
        return {"rows": len(self.rows[tag]), "times": times, "state": dict(self.samplers[tag].state())}

    def load_state(self, tag: str, state: Mapping[str, Any]) -> None:
        """See `SampledPrompts`."""
        if state["rows"] != len(self.rows[tag]):
            raise CheckpointMismatchError(
                f"the checkpoint has the state of prompt_sampler for {state['rows']} rows of {tag!r}, but there are"
                f" {len(self.rows[tag])}: give the run the same rows"
            )
        self.times[tag] = Counter({int(row): int(number) for row, number in state["times"]})
        self.samplers[tag].load_state(state["state"])

    def metrics(self) -> dict[str, float]:
        """See `SampledPrompts`."""
        several = len(self.samplers) > 1
        return {
            f"sampler/{f'{tag}/' if several else ''}{name}": value
            for tag, sampler in self.samplers.items()
            for name, value in sampler.metrics().items()
        }


def mean_counts(size: int, weights: Mapping[str, float]) -> dict[str, float]:
    """Split `size` in proportion to `weights`. Tags with 0 are omitted. Raises `DataError` if all weights are 0."""
    total = math.fsum(weights.values())
    if total <= 0:
        raise DataError("domain_interleave_probs are all 0: at least one domain needs a share")
    return {tag: size * weight / total for tag, weight in weights.items() if weight}


def domains(rewards: Mapping[str, RewardConfig], tags: Iterable[str]) -> dict[str, str]:
    """Map each of `tags` to the entry of `rewards` that scores it.

    Tags without an entry are missing. If `rewards` has only one entry, it scores every tag.
    """
    if len(rewards) == 1:
        return dict.fromkeys(tags, next(iter(rewards)))
    by_tag = {tag: domain for domain, reward in rewards.items() for tag in (domain, *reward.tag_included)}
    return {tag: by_tag[tag] for tag in tags if tag in by_tag}


def group_filter(rewards: Mapping[str, RewardConfig]) -> Callable[[Group], bool]:
    """Filter for groups, according to the domain that scores the group's tag.

    Groups that no entry of `rewards` scores, such as those of an environment, are kept.
    """

    def keep(group: Group) -> bool:
        tag = group.samples[0].tag
        domain = domains(rewards, [tag]).get(tag)
        return domain is None or passes(group, rewards[domain].query_filter_config)

    return keep


def passes(group: Group, config: QueryFilterConfig) -> bool:
    """True if the group's rewards are within the filter's bounds, which are exclusive.

    Failed rewards are ignored. A group without any reward fails both filters. The standard deviation is the unbiased
    one; rewards that differ only by rounding have none. A group of one response is kept if it has a reward.
    """
    if config.type == "no_filter":
        return True
    values = [s.reward.value for s in group.samples if s.reward is not None and s.reward.value is not None]
    if not values:
        return False
    if len(group.samples) == 1:
        return True
    args = config.filter_args
    if config.type == "mean_filter":
        return args.threshold_down < statistics.fmean(values) < args.threshold_up
    if len(values) == 1:
        return False
    _, stds_S = moments_by(torch.tensor(values, dtype=torch.float64), torch.zeros(len(values), dtype=torch.int64))
    return bool(stds_S[0] > args.std_threshold)
