"""Dynamic sampling: filters groups by the mean or the spread of their rewards, and maps tags to domains."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from roll_core.spec.config import QueryFilterConfig, RewardConfig
    from roll_core.types import Group


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

    If `rewards` has only one entry, it scores every tag.
    """
    only = next(iter(rewards.values())) if len(rewards) == 1 else None
    by_tag = dict(rewards) | {tag: reward for reward in rewards.values() for tag in reward.tag_included}

    def keep(group: Group) -> bool:
        return passes(group, (only or by_tag[group.samples[0].tag]).query_filter_config)

    return keep


def passes(group: Group, config: QueryFilterConfig) -> bool:
    """True if the group's rewards are within the filter's bounds, which are exclusive.

    Failed rewards are ignored. A group without any reward fails both filters. The standard deviation is the unbiased
    one. A group of one response is kept if it has a reward.
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
