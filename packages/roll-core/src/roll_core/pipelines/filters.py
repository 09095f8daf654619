"""Which domain a tag belongs to, and which groups are worth training on: dynamic sampling by the mean or the spread of
their rewards."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from roll_core.spec.config import QueryFilterConfig, RewardConfig
    from roll_core.types import Group


def domains(rewards: Mapping[str, RewardConfig], tags: Iterable[str]) -> dict[str, str]:
    """The entry of `rewards` that judges each of `tags`, where one does; a single judge judges every tag."""
    if len(rewards) == 1:
        return dict.fromkeys(tags, next(iter(rewards)))
    by_tag = {tag: domain for domain, reward in rewards.items() for tag in (domain, *reward.tag_included)}
    return {tag: by_tag[tag] for tag in tags if tag in by_tag}


def group_filter(rewards: Mapping[str, RewardConfig]) -> Callable[[Group], bool]:
    """By the filter of the domain that judges the group's tag; a single judge judges every tag."""
    only = next(iter(rewards.values())) if len(rewards) == 1 else None
    by_tag = dict(rewards) | {tag: reward for reward in rewards.values() for tag in reward.tag_included}

    def keep(group: Group) -> bool:
        return passes(group, (only or by_tag[group.samples[0].tag]).query_filter_config)

    return keep


def passes(group: Group, config: QueryFilterConfig) -> bool:
    """Whether the rewards are within the filter's bounds, which are exclusive.

    A failure is no reward: it takes no part, and a group of failures alone is left out by every filter. The standard
    deviation is the unbiased one; a single response has none and is kept, if it has a reward.
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
    return len(values) > 1 and statistics.stdev(values) > args.std_threshold
