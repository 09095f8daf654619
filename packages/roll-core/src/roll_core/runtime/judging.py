"""Which judge judges which sample."""

from __future__ import annotations

from typing import TYPE_CHECKING

from roll_core.errors import DataError
from roll_core.spec.reward import RewardRequest
from roll_core.types import Group

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from transformers import PreTrainedTokenizerBase

    from roll_core.runtime.roles import RewardRole
    from roll_core.spec.pipeline import Prompt
    from roll_core.types import Sample


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

    async def judged(self, prompt: Prompt, group: Group, tokenizer: PreTrainedTokenizerBase) -> Group:
        """The group with its samples' rewards."""
        role = self._roles[self.domain_of(prompt.tag)]
        rewards = await role.score([request_of(sample, prompt.text, tokenizer) for sample in group.samples])
        samples = (sample.with_reward(reward) for sample, reward in zip(group.samples, rewards, strict=True))
        return Group(id=group.id, samples=tuple(samples))


def request_of(sample: Sample, prompt: str, tokenizer: PreTrainedTokenizerBase) -> RewardRequest:
    """A sample with its response decoded, for judging only."""
    return RewardRequest(
        sample=sample, prompt=prompt, response=tokenizer.decode(sample.response_ids.tolist(), skip_special_tokens=True)
    )
