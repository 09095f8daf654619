"""Rewards by the replies of a model that generates: a role with an engine, for example a judge.

sample ──► EngineReward.messages ──► chat template ──► tokens ──► GroupInferRole ──► replies ──► EngineReward.score

The engine keeps its own weights on its slots and takes no lease: it works beside the roles that share them.
"""

from __future__ import annotations

import itertools
import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from roll_core.data.encode import Encoder
from roll_core.data.tokenizers import CHAT_HINT, stored_tokenizer
from roll_core.errors import ConfigError, ConfigProblem, DataError, RewardFailure
from roll_core.runtime.cluster.concurrency import gather
from roll_core.runtime.rollout.requests import stable_seed
from roll_core.runtime.workers.reward import scored
from roll_core.spec.config import DataArguments
from roll_core.types import GenerateRequest, Reward

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from transformers import PreTrainedTokenizerBase

    from roll_core.spec.config import EngineRewardConfig
    from roll_core.spec.rollout import EngineReward, RewardRequest
    from roll_core.types import Completion, TokenIds

log = logging.getLogger(__name__)


def reply_encoder(
    name: str, config: EngineRewardConfig, pretrain: str | None, tokenizer: PreTrainedTokenizerBase
) -> Encoder:
    """Tokenizer and chat template of the engine `name`: its model's own, or the run's if its weights are random.

    Raises `ConfigError` if the model has no tokenizer or no chat template.
    """
    model = config.model_args
    path = model.path(pretrain)
    own = stored_tokenizer(path, trust_remote_code=model.trust_remote_code) if path else tokenizer
    if own is None or not own.chat_template:
        key = "pretrain" if path and not model.model_name_or_path else f"{name}.model_args"
        lacks = "no tokenizer" if own is None else "no chat template"
        message = f"{path or 'the tokenizer of the run'} has {lacks}, which the messages of {name} need"
        raise ConfigError([ConfigProblem(where=name, key=key, message=message, hint=CHAT_HINT, code="ROLL-C041")])
    return Encoder(own, DataArguments(), chats=True)


class EngineRewardRole:
    """Scores samples by an engine's replies. Lives on the driver's event loop."""

    retries = 0
    """Always 0: the same seeds would give the same replies."""

    def __init__(
        self,
        name: str,
        config: EngineRewardConfig,
        encoder: Encoder,
        function: EngineReward,
        *,
        owner: str,
        generate: Callable[[GenerateRequest], Awaitable[Completion]],
        seed: int | None,
    ) -> None:
        """`function` makes the messages and converts replies to rewards; `owner` names it in failures. Replies depend
        on `seed` and the sample's id; None for an engine without seeds."""
        self.name, self.config = name, config
        self._generate, self._encoder, self._function = generate, encoder, function
        self._owner, self._seed = owner, seed
        self._calls = itertools.count()

    async def score(self, requests: Sequence[RewardRequest]) -> list[Reward]:
        """Score the samples of a group, concurrently."""
        return await gather([self._score(each) for each in requests])

    async def close(self) -> None:
        """Nothing to do: the engine's request queue is closed with the run."""

    async def _score(self, request: RewardRequest) -> Reward:
        try:
            tokens = self._tokens(request)
            completion = await self._generate(self._request(request.sample.id, tokens))
        except (RewardFailure, DataError) as error:
            return Reward(value=None, failure=str(error) or "the reward gave no reason")
        decode = self._encoder.tokenizer.decode
        replies = [str(decode(output.token_ids.tolist(), skip_special_tokens=True)) for output in completion.outputs]
        answered = replace(request, replies=replies)
        return scored(self._function, answered, self.config.weight, role=self.name, owner=self._owner)

    def _tokens(self, request: RewardRequest) -> TokenIds:
        try:
            messages = [dict(each) for each in self._function.messages(request)]
            return self._encoder.prompt(messages, "the prompt to the model of the reward")[1]
        except (RewardFailure, DataError):
            raise
        except Exception as error:  # a reward is third-party code, and so is a chat template
            log.warning("%s: sample %s: %s: %s", self.name, request.sample.id, type(error).__name__, error)
            raise RewardFailure(f"{self._owner}: {type(error).__name__}: {error}") from error

    def _request(self, sample: str, tokens: TokenIds) -> GenerateRequest:
        params = self.config.sampling_params()
        if params.seed is None and self._seed is not None:
            params = replace(params, seed=stable_seed(self._seed, self.name, sample))
        # Samples of training and evaluation may have equal ids, requests may not.
        id = f"{sample}#{next(self._calls)}"
        return GenerateRequest(id=id, prompt_ids=tokens, params=params, n=self.config.num_replies)
