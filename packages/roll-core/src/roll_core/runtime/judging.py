"""Which judge judges which sample."""

from __future__ import annotations

from typing import TYPE_CHECKING

from roll_core.errors import DataError
from roll_core.spec.reward import RewardRequest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from transformers import PreTrainedTokenizerBase

    from roll_core.runtime.roles import RewardRole
    from roll_core.types import Group, Sample


class Judges:
    """The run's reward roles by domain. A sample's tag chooses its judge; a single judge judges everything."""

    def __init__(self, roles: Mapping[str, RewardRole], tags: Mapping[str, Sequence[str]]) -> None:
        """`roles` by domain; `tags[domain]` lists further tags that the domain's judge answers for."""
        self._roles = roles
        self._by_tag = {domain: domain for domain in roles} | {
            tag: domain for domain, included in tags.items() for tag in included
        }

    def domain_of(self, tag: str) -> str:
        """The domain whose judge is responsible. Raises `DataError` for a tag that no judge knows."""
        if len(self._roles) == 1:
            return next(iter(self._roles))
        if tag not in self._by_tag:
            known = ", ".join(sorted(self._by_tag))
            raise DataError(
                f"no reward judges rows with tag {tag!r}: rewards know {known}; see rewards.<domain>.tag_included"
            )
        return self._by_tag[tag]

    async def judge(self, group: Group, prompt: str, tokenizer: PreTrainedTokenizerBase) -> list[Sample]:
        """The group's samples with their rewards, in order."""
        role = self._roles[self.domain_of(group.samples[0].tag)]
        rewards = await role.score([request_of(sample, prompt, tokenizer) for sample in group.samples])
        return [sample.with_reward(reward) for sample, reward in zip(group.samples, rewards, strict=True)]


def request_of(sample: Sample, prompt: str, tokenizer: PreTrainedTokenizerBase) -> RewardRequest:
    """A sample with its response decoded, for judging only."""
    return RewardRequest(
        sample=sample, prompt=prompt, response=tokenizer.decode(sample.response_ids.tolist(), skip_special_tokens=True)
    )
