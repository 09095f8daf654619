"""Test group *ends*: end positions of responses, their last tokens, and their finish reasons."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from roll_core.errors import UnsupportedError
from roll_testing.infer.engine import ask
from roll_testing.infer.kit import FIRST_ORDINARY, InferKit
from roll_testing.infer.models import CLEAR

if TYPE_CHECKING:
    from roll_core.spec.model import ModelSpec
    from roll_core.types import CompletionOutput, TokenIds
    from roll_testing.infer.engine import Engine, Setup
    from roll_testing.infer.models import Oracle

LENGTH = 24
"""Tokens of the greedy responses that tests end early."""


class EndTests(InferKit):
    """A greedy response is the same every time, so tests can compute its expected end."""

    def test_max_new_tokens_are_generated(self, engine: Engine) -> None:
        """A response must have exactly `max_new_tokens` tokens and finish reason `length`.

        Requests for 1, 5 and 33 tokens run together.
        """
        for number, completion in zip(
            (1, 5, 33),
            engine.generate(*[ask(self.prompt(4), max_new_tokens=num_tokens) for num_tokens in (1, 5, 33)]),
            strict=True,
        ):
            _is(completion.outputs[0], number, "length", None)

    def test_the_models_end_token_ends_a_response(self, engine: Engine) -> None:
        """The model's end token must end a response. The token is kept, with its logprob, and named by `stop`."""
        if not self.end_ids:
            pytest.skip(f"the model of {self.name} has no end token")
        requests = [
            ask(self.prompt(3 + i), n=4, max_new_tokens=120, ignore_eos=False, seed=self.seed(engine, i))
            for i in range(4)
        ]
        ended = 0
        for completion in engine.generate(*requests):
            for output in completion.outputs:
                places = [i for i, token in enumerate(output.token_ids.tolist()) if token in self.end_ids]
                if places:
                    ended += 1
                    _is(output, places[0] + 1, "stop", int(output.token_ids[places[0]]))
                else:
                    _is(output, 120, "length", None)
        assert ended, "no response of 120 tokens had an end token: the model gives end tokens too little probability"

    def test_stop_token_ids_end_a_response(self, engine: Engine, setup: Setup, oracle: Oracle) -> None:
        """A response must end at the first of its `stop_token_ids`. The token is kept and named by `stop`."""
        self.need_exact(setup)
        prompt, tokens, position = self._unended(engine, oracle)
        request = ask(
            prompt,
            temperature=0.0,
            max_new_tokens=LENGTH,
            ignore_eos=False,
            stop_token_ids=(tokens[position], tokens[-1]),
        )
        output = engine.generate(request)[0].outputs[0]
        end = min(tokens.index(token) for token in request.params.stop_token_ids)
        _is(output, end + 1, "stop", tokens[end])
        _begins(output, tokens)

    def test_ignore_eos_continues_past_every_end(self, engine: Engine, setup: Setup) -> None:
        """With `ignore_eos`, a response must continue past end tokens, `stop_token_ids` and `stop` strings."""
        everything = tuple(range(self.vocab_size))
        completions = engine.generate(
            *[ask(self.prompt(3 + i), max_new_tokens=40, stop_token_ids=everything) for i in (0, 1)]
        )
        for completion in completions:
            _is(completion.outputs[0], 40, "length", None)
        greedy: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": LENGTH}
        try:
            engine.generate(ask(self.prompt(5), stop=("no such text",), **greedy))
        except UnsupportedError:  # `test_a_stop_string_ends_a_response_and_is_kept` checks it
            return
        response = engine.generate(ask(self.prompt(5), **greedy))[0].outputs[0].token_ids.tolist()
        stop = self._text(setup.model, response)[1:3]
        _is(engine.generate(ask(self.prompt(5), stop=(stop,), **greedy))[0].outputs[0], LENGTH, "length", None)

    def test_min_new_tokens_masks_ends(self, engine: Engine, setup: Setup, oracle: Oracle) -> None:
        """End tokens and stop ids must be masked before `min_new_tokens`.

        The most likely of all other tokens is chosen instead.
        """
        self.need_exact(setup)
        self.generate_or_skip(engine, "min_new_tokens", ask(self.prompt(3), min_new_tokens=2))
        prompt, tokens, position = self._unended(engine, oracle)
        ends = {tokens[1], tokens[position], *self.end_ids}
        request = ask(
            prompt,
            temperature=0.0,
            max_new_tokens=12,
            min_new_tokens=8,
            ignore_eos=False,
            stop_token_ids=tuple(ends - set(self.end_ids)),
        )
        output = engine.generate(request)[0].outputs[0]
        self.check_greedy(oracle, prompt, output.token_ids, banned=ends, banned_until=8)
        places = [i for i, token in enumerate(output.token_ids.tolist()) if token in ends]
        assert not places or places[0] >= 8, (
            f"{output.token_ids.tolist()} has one of {sorted(ends)} among the first 8 tokens"
        )
        if places:
            _is(output, places[0] + 1, "stop", int(output.token_ids[places[0]]))
        else:
            _is(output, 12, "length", None)

    def test_a_stop_string_ends_a_response_and_is_kept(self, engine: Engine, setup: Setup, oracle: Oracle) -> None:
        """A stop string must end a response at the token that completes it, even if it spans two tokens.

        The string is kept and named by `stop`.
        """
        self.need_exact(setup)
        self.generate_or_skip(
            engine, "stop", ask(self.prompt(3), max_new_tokens=1, ignore_eos=False, stop=("no such text",))
        )
        prompt, tokens, position = self._unended(engine, oracle)
        text = self._text(setup.model, tokens[: position + 1])
        stop = text[-2:]
        request = ask(prompt, temperature=0.0, max_new_tokens=LENGTH, ignore_eos=False, stop=(stop, "no such text"))
        output = engine.generate(request)[0].outputs[0]
        end = next(i for i in range(LENGTH) if stop in self._text(setup.model, tokens[: i + 1]))
        _is(output, end + 1, "stop", stop)
        _begins(output, tokens)

    # -- helpers -------------------------------------------------------------------------------------------------------

    def _unended(self, engine: Engine, oracle: Oracle) -> tuple[TokenIds, list[int], int]:
        """Return a prompt, the engine's greedy response of ordinary tokens, and an index from 3 on.

        The token at the index occurs there for the first time. No order of summation could change the response.
        """
        known = self._once("unended")
        for seed in range(0 if "it" in known else 10):
            requests = [ask(self.prompt(5 + i, seed), temperature=0.0, max_new_tokens=LENGTH) for i in range(6)]
            for request, completion in zip(requests, engine.generate(*requests), strict=True):
                response = completion.outputs[0].token_ids
                tokens = response.tolist()
                places = [i for i in range(3, LENGTH - 4) if tokens.index(tokens[i]) == i]
                _, gaps = oracle.shortfall(request.prompt_ids, response)
                if places and gaps.min() > CLEAR and not {*range(FIRST_ORDINARY), *self.end_ids} & set(tokens):
                    known.setdefault("it", (request.prompt_ids, tokens, places[0]))
            if known:
                break
        assert known, "every greedy response of the model ends or repeats itself: give it larger weights"
        unended: tuple[TokenIds, list[int], int] = known["it"]
        return unended

    def _text(self, model: ModelSpec, tokens: list[int]) -> str:
        from roll_modeling.model import load_tokenizer

        known = self._once("tokenizer")
        if "it" not in known:
            known["it"] = load_tokenizer(model)
        return str(known["it"].decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _is(output: CompletionOutput, number: int, reason: str, stop: str | int | None) -> None:
    ending = (len(output.token_ids), output.finish_reason, output.stop)
    assert ending == (number, reason, stop), (
        f"a response of {ending[0]} tokens ended by {ending[1]!r} with stop {ending[2]!r}; expected {number} tokens,"
        f" {reason!r}, {stop!r}"
    )
    assert len(output.logprobs) == len(output.versions) == number, (
        f"{number} tokens have {len(output.logprobs)} logprobs and {len(output.versions)} versions"
    )


def _begins(output: CompletionOutput, tokens: list[int] | tuple[int, ...]) -> None:
    sampled = output.token_ids.tolist()
    assert sampled == list(tokens)[: len(sampled)], (
        f"the response is {sampled}; the most likely tokens are {list(tokens)}"
    )
