"""OpenAI's completions, `POST /v1/completions`, with logprobs of the prompt: for tasks that compare given answers.

    prompts (text or ids) ── GenerateRequest(prompt_logprobs, prompt_topk) ──► engine
    choices: text, tokens, token_logprobs, top_logprobs ◄── Completion ──────────┘

With `echo`, the logprobs are those of the prompt's tokens, then of the sampled tokens. A token is the most likely one
if and only if its logprob is the highest in `top_logprobs`.
"""

from __future__ import annotations

import time
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from roll_core.types import GenerateRequest, Rollout, SamplingParams
from roll_pipeline_agentic.calls import state_of
from roll_pipeline_agentic.recording import RequestError, record_turn

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from transformers import PreTrainedTokenizerBase

    from roll_core.spec.pipeline import InferRole
    from roll_core.types import Completion, TokenIds, TurnRecord

Body = dict[str, Any]
PATH = "/v1/completions"
MAX_LOGPROBS = 5
"""Maximum number of most likely tokens per position, as in OpenAI's API."""
MAX_TOKENS = 16
"""Default of `max_tokens`, as in OpenAI's API."""
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "stream": (False,),
    "suffix": ("",),
    "logit_bias": ({},),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
}
"""Parameters that are not supported, with the values that have no effect."""
SAMPLING: Mapping[str, type | tuple[type, ...]] = {
    "temperature": (int, float),
    "top_p": (int, float),
    "top_k": int,
    "min_p": (int, float),
    "repetition_penalty": (int, float),
    "seed": int,
}


class Completions:
    """Completions of one process of a harness. Lives on the driver's event loop."""

    def __init__(
        self,
        engine: InferRole,
        tokenizer: PreTrainedTokenizerBase,
        *,
        key: str,
        max_tokens: int,
        fail: Callable[[BaseException], None],
    ) -> None:
        """`key` begins the ids of requests. `max_tokens` limits prompt and reply. `fail` receives the engine's error,
        which ends the run."""
        self._engine, self._tokenizer, self._key = engine, tokenizer, key
        self._max_tokens, self._fail = max_tokens, fail
        self._texts: dict[int, str] = {}
        """Texts of single tokens."""
        self._num_requests = 0
        self.first: TurnRecord | None = None
        """The first prompt and the tokens sampled after it."""

    async def reply(self, body: Any) -> Body:
        """The body of the reply. Raises `RequestError` for a request that the endpoint rejects."""
        if not isinstance(body, dict):
            raise RequestError(f"the body is {type(body).__name__}, expected a JSON object")
        for name, neutral in NEUTRAL.items():
            if body.get(name) is not None and body[name] not in neutral:
                raise RequestError(f"{name} {body[name]!r:.80} is not supported by this endpoint", code="unsupported")
        prompts, echo = self._prompts(body.get("prompt")), bool(body.get("echo"))
        max_tokens = _count(body, "max_tokens", MAX_TOKENS, least=0 if echo else 1)
        num_top = _count(body, "logprobs", 0, least=0)
        if num_top > MAX_LOGPROBS:
            raise RequestError(f"logprobs is {num_top}, expected at most {MAX_LOGPROBS}")
        if num_top and (not echo or max_tokens > 1):
            raise RequestError("logprobs needs echo and max_tokens 0 or 1: sampled tokens have no alternatives")
        params = SamplingParams(max_new_tokens=max(max_tokens, 1), stop=_stop(body.get("stop")), **_sampling(body))
        for prompt in prompts:
            if len(prompt) + params.max_new_tokens > self._max_tokens:
                raise RequestError(
                    f"the prompt has {len(prompt)} tokens, and may have {self._max_tokens} with the reply",
                    code="context_length_exceeded",
                )
        requests = [
            GenerateRequest(
                id=f"{self._key}/{self._num_requests + index}",
                prompt_ids=prompt,
                params=params,
                prompt_logprobs=num_top > 0,
                prompt_topk=num_top,
            )
            for index, prompt in enumerate(prompts)
        ]
        self._num_requests += len(requests)
        try:
            completions = await self._engine.generate(requests)
        except Exception as error:  # of the engine or the runtime
            self._fail(error)
            raise
        if self.first is None:
            (output,) = completions[0].outputs
            self.first = record_turn(output, prompts[0], Rollout(turns=()), None, state=state_of(None, []))
        choices = [
            self._choice(index, prompt, completion, params, echo=echo, num_sampled=max_tokens, num_top=num_top)
            for index, (prompt, completion) in enumerate(zip(prompts, completions, strict=True))
        ]
        prompt_tokens = sum(map(len, prompts))
        sampled = sum(len(completion.outputs[0].token_ids) for completion in completions) if max_tokens else 0
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": sampled, "total_tokens": prompt_tokens + sampled}
        return {
            "id": f"cmpl-{requests[0].id}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": str(body.get("model") or "policy"),
            "choices": choices,
            "usage": usage,
        }

    def _prompts(self, value: Any) -> list[TokenIds]:
        """The prompts as ids. Text is encoded with the tokenizer's special tokens. Raises `RequestError`."""
        is_one = isinstance(value, str) or (isinstance(value, list) and value and isinstance(value[0], int))
        prompts = []
        for prompt in [value] if is_one else value if isinstance(value, list) else ():
            ids = self._tokenizer(prompt).input_ids if isinstance(prompt, str) else prompt
            valid = isinstance(ids, list) and ids and all(type(token) is int for token in ids)
            if not valid or min(ids) < 0 or max(ids) >= len(self._tokenizer):
                raise RequestError(f"prompt {prompt!r:.80} is no text and no list of the tokenizer's ids")
            prompts.append(np.asarray(ids, dtype=np.int64))
        if not prompts:
            raise RequestError("prompt is missing, expected a text, a list of ids, or a list of these")
        return prompts

    def _choice(
        self,
        index: int,
        prompt: TokenIds,
        completion: Completion,
        params: SamplingParams,
        *,
        echo: bool,
        num_sampled: int,
        num_top: int,
    ) -> Body:
        (output,) = completion.outputs
        sampled = output.token_ids if num_sampled else output.token_ids[:0]
        text = str(self._tokenizer.decode(sampled.tolist(), skip_special_tokens=True))
        for stop in params.stop:
            text = text.partition(stop)[0]
        if echo:
            text = str(self._tokenizer.decode(prompt.tolist())) + text
        logprobs = None
        if num_top:
            logprobs = self._prompt_logprobs(prompt, completion)
            for token, logprob in zip(sampled.tolist(), output.logprobs.tolist(), strict=False):
                logprobs["tokens"].append(self._text(token))
                logprobs["token_logprobs"].append(logprob)
                logprobs["top_logprobs"].append({self._text(token): logprob})
            logprobs["text_offset"] = list(accumulate(map(len, logprobs["tokens"][:-1]), initial=0))
        reason = "length" if output.finish_reason == "length" or not num_sampled else "stop"
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _prompt_logprobs(self, prompt: TokenIds, completion: Completion) -> Body:
        values, top = completion.prompt_logprobs, completion.prompt_topk
        if values is None or top is None:
            raise AssertionError("an engine with both capabilities returns them")
        most_likely = top.ids[:, 0] == prompt
        # Both numbers of a token are computed alike, but not always with the same rounding.
        below = np.minimum(values, np.nextafter(top.logprobs[:, 0], np.float32(-np.inf), dtype=np.float32))
        logprobs = np.where(most_likely, top.logprobs[:, 0], below).tolist()
        tops: list[Mapping[str, float] | None] = [None]
        for token, logprob, ids, top_logprobs in list(
            zip(prompt.tolist(), logprobs, top.ids.tolist(), top.logprobs.tolist(), strict=True)
        )[1:]:
            others = zip(reversed(ids), reversed(top_logprobs), strict=True)  # of equal texts, the likeliest counts
            tops.append({self._text(token): logprob} | {self._text(id): value for id, value in others})
        return {
            "tokens": [self._text(token) for token in prompt.tolist()],
            "token_logprobs": [None, *logprobs[1:]],
            "top_logprobs": tops,
        }

    def _text(self, token: int) -> str:
        text = self._texts.get(token)
        if text is None:
            text = self._texts[token] = str(self._tokenizer.decode([token]))
        return text


def _count(body: Body, name: str, default: int, *, least: int) -> int:
    value = default if body.get(name) is None else body[name]
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise RequestError(f"{name} is {value!r:.40}, expected an integer of at least {least}")
    return value


def _stop(value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) and value else list(value or ())
    if not all(isinstance(text, str) for text in texts):
        raise RequestError(f"stop is {value!r:.80}, expected texts")
    return tuple(text for text in texts if text)


def _sampling(body: Body) -> dict[str, Any]:
    """Sampling parameters of a request. Raises `RequestError`."""
    values = {name: body[name] for name in SAMPLING if body.get(name) is not None}
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, SAMPLING[name]):
            raise RequestError(f"{name} is {value!r:.40}, expected a number")
    return values
