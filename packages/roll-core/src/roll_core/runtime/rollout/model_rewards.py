"""Rewards by roles with a model: reward models, and engines that generate, for example judges.

A model of task `reward` scores the samples of several groups in one pass:

    groups that wait ──► ModelRewardRole ──► ModelInput ──► TrainRole.score ──► RewardFunction ──► reward
                                             tokens         values

In a synchronous run, a pass begins when the engine has finished all its requests: every group of the round waits then.
The composition of the pass, and with it the last bits of the scores, therefore does not depend on timing. Generation
and scoring alternate on shared slots, with the engine and the reward model side by side in their memory.

An engine replies to each sample. It keeps its own weights on its slots without a lease: it works beside the roles
that share them.

    sample ──► EngineReward.messages ──► chat template ──► tokens ──► GroupInferRole ──► replies ──► EngineReward.score
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from typing_extensions import override

from roll_core.data.encode import Encoder, media_of
from roll_core.data.reasoning import decode_response
from roll_core.data.templates import date_of, set_date
from roll_core.data.tokenizers import CHAT_HINT, stored_tokenizer
from roll_core.errors import ConfigError, ConfigProblem, DataError, RewardFailure
from roll_core.runtime.cluster.concurrency import background, cancel_all, gather
from roll_core.runtime.rollout.requests import stable_seed
from roll_core.runtime.workers.reward import scored
from roll_core.spec.config import DataArguments
from roll_core.spec.model import REWARD_MODEL_HINT, reward_model_problem
from roll_core.spec.rollout import IMAGE, EngineReward, RewardFunction, RewardRequest
from roll_core.spec.train import WantedOutputs
from roll_core.types import GenerateRequest, Reward, TrainSequence

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

    from roll_core.spec.config import EngineRewardConfig, ModelRewardConfig, RewardConfig
    from roll_core.spec.pipeline import TrainRole
    from roll_core.types import Completion, Media, TokenIds

log = logging.getLogger(__name__)


class ModelReward(RewardFunction):
    """Reward `model`: the model's output at the last token, as transformers' sequence classification computes it."""

    @override
    def score(self, request: RewardRequest) -> Reward:
        """Return the last value. Raises `RewardFailure` if the model computed none."""
        if request.values is None or not len(request.values):
            raise RewardFailure("the reward model computed no value")
        return Reward(value=float(request.values[-1]))


class ModelInput:
    """Converts samples to the tokens that a reward model reads. The model's output at the last one is the score."""

    def __init__(
        self, *, vocab_size: int = 0, pad_token_id: int | None = None, tokenizer: PreTrainedTokenizerBase | None = None
    ) -> None:
        """`vocab_size` and `pad_token_id` are the model's, if known.

        Without `tokenizer`, the tokens are those of the sample. With it, the text is rendered and encoded again.
        """
        self._vocab_size, self._pad_token_id = vocab_size, pad_token_id
        self._encoder = None if tokenizer is None else Encoder(tokenizer, DataArguments())

    def media(self, request: RewardRequest) -> tuple[Media, ...]:
        """Images of `tokens`."""
        return request.sample.media if self._encoder is None else media_of(request.messages)

    def tokens(self, request: RewardRequest) -> TokenIds:
        """Tokens `[L]` of prompt and response, without padding at the end, which transformers does not score either.

        Raises `RewardFailure` for text or tokens that the model cannot read.
        """
        tokens = self._sampled(request) if self._encoder is None else self._rendered(self._encoder, request)
        content = np.flatnonzero(tokens != self._pad_token_id) if self._pad_token_id is not None else tokens
        if not len(content):
            raise RewardFailure("the sample has no token that the reward model reads")
        if 0 < self._vocab_size <= tokens.max():
            raise RewardFailure(
                f"token id {tokens.max()}, but the reward model's vocabulary size is {self._vocab_size}"
            )
        return tokens if content is tokens else tokens[: content[-1] + 1]

    @staticmethod
    def _sampled(request: RewardRequest) -> TokenIds:
        sample = request.sample
        return np.concatenate([sample.prompt_ids, sample.response_ids]).astype(np.int64, copy=False)

    @staticmethod
    def _rendered(encoder: Encoder, request: RewardRequest) -> TokenIds:
        text = request.response.replace(IMAGE, "") if media_of(request.messages) else request.response
        response = {"role": "assistant", "content": text}
        try:
            tokens = encoder.rendered([*map(dict, request.messages), response], "the sample")
        except DataError as error:
            raise RewardFailure(f"the reward model cannot read the sample: {error}") from error
        if len(tokens) > (longest := encoder.tokenizer.model_max_length):
            raise RewardFailure(f"{len(tokens)} tokens, but the reward model's tokenizer allows {longest}")
        return tokens


def model_input(name: str, config: ModelRewardConfig, tokenizer: PreTrainedTokenizerBase) -> ModelInput:
    """Choose the input of the reward model `name` by `config.input`. `tokenizer` is the run's.

    Loads the reward model's config and tokenizer. Raises `ConfigError` for an input or a model that cannot be used.
    """
    model = config.model_args
    if model.model_name_or_path is None:
        log.info("%s reads the sampled tokens", name)
        return ModelInput()
    keys = _keys_of(name, model.model_name_or_path, trust_remote_code=model.trust_remote_code)
    model_tokenizer = stored_tokenizer(model.model_name_or_path, trust_remote_code=model.trust_remote_code)
    if model_tokenizer is not None and (date := date_of(tokenizer)) is not None:
        set_date(model_tokenizer, date)
    differs = "" if model_tokenizer is None else _difference(model_tokenizer, tokenizer)
    if config.input == "text" and model_tokenizer is None:
        hint = "set input: tokens if the model reads the policy's tokens, or name a directory with a tokenizer"
        raise _unusable(name, "input", f"found text, but {model.model_name_or_path} has no tokenizer", hint)
    if config.input == "tokens" and differs and differs != TEMPLATE:
        hint = "set input: text, which encodes the text with the reward model's tokenizer"
        raise _unusable(name, "input", f"found tokens, but the reward model has another vocabulary: {differs}", hint)
    as_text = config.input == "text" or (config.input == "auto" and bool(differs))
    vocab_size = int(getattr(keys, "vocab_size", 0) or 0)
    if not as_text and 0 < vocab_size < len(tokenizer):
        message = f"the vocabulary size of the reward model is {vocab_size}, that of the tokenizer {len(tokenizer)}"
        hint = "name a reward model with the policy's tokenizer, or with its own"
        raise _unusable(name, "model_args.model_name_or_path", message, hint)
    why = f" (the tokenizers differ: {differs})" if differs else ""
    log.info("%s reads %s%s", name, "text" if as_text else "the sampled tokens", why)
    pad_token_id = getattr(keys, "pad_token_id", None)
    return ModelInput(vocab_size=vocab_size, pad_token_id=pad_token_id, tokenizer=model_tokenizer if as_text else None)


TEMPLATE = "their chat templates"


def _keys_of(name: str, path: str, *, trust_remote_code: bool) -> PreTrainedConfig:
    """The text part of the reward model's config. Raises `ConfigError`."""
    from transformers import AutoConfig

    key = "model_args.model_name_or_path"
    try:
        model_config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        first_line = str(error).strip().splitlines()[0]
        raise _unusable(
            name, key, f"cannot load {path}: {first_line}", "name a reward model's directory or hub id"
        ) from error
    if why := reward_model_problem(model_config.to_dict()):
        raise _unusable(name, key, f"{path} is not a reward model: {why}", REWARD_MODEL_HINT)
    keys: PreTrainedConfig = model_config.get_text_config()
    return keys


def _difference(model_tokenizer: PreTrainedTokenizerBase, policys: PreTrainedTokenizerBase) -> str:
    """First difference between two tokenizers; empty if they have the same vocabulary and chat template."""
    mine, theirs = model_tokenizer.get_vocab(), policys.get_vocab()
    for token, index in theirs.items():
        if mine.get(token) != index:
            return f"{token!r} is token {index} of the policy and {mine.get(token, 'no token')} of the reward model"
    return "" if model_tokenizer.chat_template == policys.chat_template else TEMPLATE


def _unusable(name: str, key: str, message: str, hint: str) -> ConfigError:
    return ConfigError([ConfigProblem(where=name, key=f"{name}.{key}", message=message, hint=hint, code="ROLL-C041")])


@dataclass(eq=False, slots=True)
class _Group:
    """The samples of a group that wait for their rewards."""

    requests: Sequence[RewardRequest]
    rewards: asyncio.Future[list[Reward]]


class ModelRewardRole:
    """Scores groups by a reward model. Lives on the driver's event loop."""

    retries = 0
    """Always 0: a pass would have the same result again."""

    def __init__(
        self,
        role: TrainRole,
        config: RewardConfig,
        input: ModelInput,
        function: RewardFunction,
        *,
        owner: str,
        ready: Callable[[], Awaitable[None]],
    ) -> None:
        """`function` converts the model's outputs to rewards; `owner` names it in failures. A pass begins once `ready`
        has returned."""
        self.name, self.config = role.name, config
        self._role, self._input, self._function, self._owner, self._ready = role, input, function, owner, ready
        self._waiting: list[_Group] = []
        self._task: asyncio.Task[None] | None = None

    async def score(self, requests: Sequence[RewardRequest]) -> list[Reward]:
        """Score the samples of a group, together with those of other groups that wait."""
        group = _Group(requests, asyncio.get_running_loop().create_future())
        self._waiting.append(group)
        if self._task is None or self._task.done():
            self._task = background(self._score_waiting(), name=f"scoring by {self.name}")
        return await group.rewards

    async def close(self) -> None:
        """Cancel scoring."""
        if self._task is not None:
            await cancel_all([self._task])

    async def _score_waiting(self) -> None:
        while self._waiting:
            await self._ready()
            groups = [group for group in self._waiting if not group.rewards.done()]
            self._waiting = []
            groups.sort(key=lambda group: group.requests[0].sample.id)
            try:
                rewards = iter(await self._rewards([request for group in groups for request in group.requests]))
            except Exception as error:  # raised to every caller
                for group in groups:
                    if not group.rewards.done():
                        group.rewards.set_exception(error)
                continue
            for group in groups:
                group_rewards = [next(rewards) for _ in group.requests]
                if not group.rewards.done():
                    group.rewards.set_result(group_rewards)

    async def _rewards(self, requests: Sequence[RewardRequest]) -> list[Reward]:
        inputs: dict[int, TokenIds] = {}
        failures: dict[int, Reward] = {}
        for index, request in enumerate(requests):
            try:
                inputs[index] = self._input.tokens(request)
            except RewardFailure as failure:
                failures[index] = Reward(value=None, failure=str(failure))
        sequences = [
            TrainSequence(
                id=str(index),
                tokens=tokens,
                media=self._input.media(requests[index]),
                loss_mask=np.arange(len(tokens)) > 0,
            )
            for index, tokens in inputs.items()
        ]
        values = (await self._role.score(sequences, WantedOutputs(values=True))).values if sequences else None
        outputs = dict(zip(inputs, values or (), strict=True))
        return [
            failures.get(index) or self._reward(replace(request, values=outputs[index]))
            for index, request in enumerate(requests)
        ]

    def _reward(self, request: RewardRequest) -> Reward:
        weight = self.config.weight
        return scored(self._function, request, weight, role=self.name, owner=self._owner)


def reply_encoder(
    name: str, config: EngineRewardConfig, pretrain: str | None, tokenizer: PreTrainedTokenizerBase
) -> Encoder:
    """Tokenizer and chat template of the engine `name`: its model's own, or the run's if its weights are random.

    Raises `ConfigError` if the model has no tokenizer or no chat template.
    """
    model = config.model_args
    path = model.path(pretrain)
    model_tokenizer = stored_tokenizer(path, trust_remote_code=model.trust_remote_code) if path else tokenizer
    if model_tokenizer is None or not model_tokenizer.chat_template:
        key = "pretrain" if path and not model.model_name_or_path else f"{name}.model_args"
        lacks = "no tokenizer" if model_tokenizer is None else "no chat template"
        message = f"{path or 'the tokenizer of the run'} has {lacks}, which the messages of {name} need"
        raise ConfigError([ConfigProblem(where=name, key=key, message=message, hint=CHAT_HINT, code="ROLL-C041")])
    if (date := date_of(tokenizer)) is not None:
        set_date(model_tokenizer, date)
    data = DataArguments(chat_template_kwargs=config.chat_template_kwargs)
    return Encoder(model_tokenizer, data, chats=True)


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
        return await gather([self._score(request) for request in requests])

    async def close(self) -> None:
        """Nothing to do: the engine's request queue is closed with the run."""

    async def _score(self, request: RewardRequest) -> Reward:
        try:
            tokens, media = self._prompt(request)
            completion = await self._generate(self._request(request.sample.id, tokens, media))
        except (RewardFailure, DataError) as error:
            return Reward(value=None, failure=str(error) or "the reward gave no reason")
        tokenizer = self._encoder.tokenizer
        replies = [decode_response(tokenizer, output.token_ids.tolist()) for output in completion.outputs]
        reasons = [output.finish_reason for output in completion.outputs]
        answered = replace(request, replies=replies, reply_finish_reasons=reasons)
        return scored(self._function, answered, self.config.weight, role=self.name, owner=self._owner)

    def _prompt(self, request: RewardRequest) -> tuple[TokenIds, tuple[Media, ...]]:
        try:
            messages = [dict(message) for message in self._function.messages(request)]
            return self._encoder.prompt(messages, "the prompt to the model of the reward")[1], media_of(messages)
        except (RewardFailure, DataError):
            raise
        except Exception as error:  # a reward is third-party code, and so is a chat template
            log.warning("%s: sample %s: %s: %s", self.name, request.sample.id, type(error).__name__, error)
            raise RewardFailure(f"{self._owner}: {type(error).__name__}: {error}") from error

    def _request(self, sample: str, tokens: TokenIds, media: tuple[Media, ...]) -> GenerateRequest:
        params = self.config.sampling_params()
        if params.seed is None and self._seed is not None:
            params = replace(params, seed=stable_seed(self._seed, self.name, sample))
        # Samples of training and evaluation may have equal ids, requests may not.
        id = f"{sample}#{next(self._calls)}"
        return GenerateRequest(id=id, prompt_ids=tokens, media=media, params=params, n=self.config.num_replies)
