"""Test group *numbers*: greedy tokens are the most likely ones, and logprobs are the model's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from roll_modeling.activations import recorded
from roll_testing.bounds import check_rows
from roll_testing.infer.engine import ask
from roll_testing.infer.kit import InferKit
from roll_testing.infer.models import log_softmax
from roll_testing.infer.trainer import check_against_trainer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from roll_testing.infer.engine import Engine, Setup
    from roll_testing.infer.models import Oracle

    EngineOf = Callable[[Setup], Engine]

LENGTHS = (1, 3, 17, 40, 7)
"""Lengths of prompts."""
CUTS: Mapping[str, Any] = {"top_k": 3, "top_p": 0.5, "min_p": 0.4, "repetition_penalty": 1.6}


class InferNumberTests(InferKit):
    """Compares with the model's logits as transformers computes them, one whole sequence at a time."""

    def test_a_started_engine_has_the_models_weights(self, engine_of: EngineOf, setup: Setup, oracle: Oracle) -> None:
        """A started engine must have the model's weights, as version 0, without an update."""
        self.check_outputs(self._unpublished(engine_of, setup), setup, oracle)

    def test_greedy_tokens_are_the_most_likely(self, engine: Engine, setup: Setup, oracle: Oracle) -> None:
        """At `temperature == 0`, each token must be the most likely one after the tokens before it."""
        self.need_exact(setup)
        requests = [ask(self.prompt(length), temperature=0.0) for length in LENGTHS]
        for request, completion in zip(requests, engine.generate(*requests), strict=True):
            self.check_greedy(oracle, request.prompt_ids, completion.outputs[0].token_ids)

    def test_greedy_outputs_repeat(self, engine: Engine) -> None:
        """Equal sets of greedy requests must have equal tokens and logprobs, bit for bit.

        All outputs of a greedy request must have the same tokens.
        """
        first, second = (
            engine.generate(*[ask(self.prompt(length), n=2, temperature=0.0) for length in LENGTHS]) for _ in range(2)
        )
        for one, other in zip(first, second, strict=True):
            streams = {tuple(output.token_ids.tolist()) for output in one.outputs}
            assert len(streams) == 1, f"outputs of one greedy request differ: {sorted(streams)}"
            for output, again in zip(one.outputs, other.outputs, strict=True):
                assert output.token_ids.tolist() == again.token_ids.tolist(), (
                    f"equal greedy requests returned {output.token_ids.tolist()} and then {again.token_ids.tolist()}"
                )
                assert np.array_equal(output.logprobs, again.logprobs), (
                    "equal greedy requests returned equal tokens but different logprobs"
                )

    def test_logprobs_equal_the_reference(self, engine: Engine, setup: Setup, oracle: Oracle) -> None:
        """Logprobs of tokens sampled at temperature 1 must equal the reference's.

        Logprobs of greedy tokens must be those at temperature 1.
        """
        requests = [ask(self.prompt(length), n=2, seed=self.seed(engine, length)) for length in LENGTHS]
        requests.append(ask(self.prompt(9), temperature=0.0))
        self.check_logprobs(setup, oracle, requests, engine.generate(*requests))

    def test_logprobs_equal_the_train_strategys(self, engine: Engine, setup: Setup) -> None:
        """Logprobs must equal those of `train_strategy` on the same weights, at a temperature.

        The trainer packs sequences and computes each as a whole. Uses `train_strategy` whatever the author's reference
        is.
        """
        self.need_trainer(setup)
        requests = [
            ask(self.prompt(length), n=2, temperature=0.8, seed=self.seed(engine, length)) for length in LENGTHS
        ]
        check_against_trainer(self.train_strategy, setup, requests, engine.generate(*requests))

    def test_logprobs_have_the_temperature(self, engine: Engine, setup: Setup, oracle: Oracle) -> None:
        """Logprobs must be those of softmax(logits / temperature). Requests of several temperatures run together."""
        requests = [
            ask(self.prompt(length), temperature=temperature, seed=self.seed(engine, length))
            for length, temperature in zip(LENGTHS, (0.5, 1.0, 1.7, 0.3, 0.8), strict=True)
        ]
        self.check_logprobs(setup, oracle, requests, engine.generate(*requests))

    @pytest.mark.parametrize("parameter", list(CUTS))
    def test_logprobs_ignore_penalties_and_cuts(
        self, engine: Engine, setup: Setup, oracle: Oracle, parameter: str
    ) -> None:
        """Logprobs must be over the whole vocabulary, before repetition penalty, top-k, top-p and min-p.

        They include the temperature.
        """
        request = ask(self.prompt(6), temperature=0.7, seed=self.seed(engine, 1), **{parameter: CUTS[parameter]})
        self.check_logprobs(setup, oracle, [request], self.generate_or_skip(engine, parameter, request))

    def test_a_prompt_is_used_as_given(self, engine: Engine, setup: Setup, oracle: Oracle) -> None:
        """A prompt must be used as given: end tokens, padding and repetitions within it are ordinary tokens."""
        odd = [5, *self.end_ids, 0, 0, 7, *self.end_ids, *self.end_ids, 9]
        requests = [ask(odd, seed=self.seed(engine, 1)), ask([0, *odd])]
        self.check_logprobs(setup, oracle, requests, engine.generate(*requests))

    def test_prompt_logprobs_equal_the_reference(self, engine: Engine, setup: Setup, oracle: Oracle) -> None:
        """Prompt logprobs `[P]` must equal the reference's: 0 for the first token, and without temperature.

        They must be present only if requested. Equal and overlapping prompts run together, twice, which exposes faults
        of prefix caches.
        """
        self.need(self.can.prompt_logprobs, "prompt_logprobs")
        long = self.prompt(300)
        for _ in range(2):
            requests = [
                ask(prompt, prompt_logprobs=True, max_new_tokens=1, temperature=0.5)
                for prompt in (self.prompt(20), self.prompt(20), long, long[:150], long[:1])
            ]
            requests.append(ask(self.prompt(20)))
            *asked, other = engine.generate(*requests)
            if other.prompt_logprobs is not None or any(completion.prompt_logprobs is None for completion in asked):
                raise AssertionError("prompt logprobs must be returned if requested, and only then")
            logprobs = {
                completion.id: completion.prompt_logprobs
                for completion in asked
                if completion.prompt_logprobs is not None
            }
            expected = {request.id: oracle.prompt_logprobs(request.prompt_ids) for request in requests[:-1]}
            check_rows("prompt logprob", logprobs, expected, self.bound(setup))

    def test_activations_equal_the_reference(self, engine: Engine, setup: Setup, oracle: Oracle) -> None:
        """Activations `[L, W]` must be those of the points of transformers' model with these names, at least one, and
        the weights must be those of the model."""
        self.need(self.can.activations, "activations")
        prompt = self.prompt(20)
        activations = engine.run(lambda: engine.strategy.activations(prompt))
        with recorded(oracle.model.module) as expected:
            oracle.logits(prompt)
        assert activations, "no activation"
        unknown = activations.keys() - expected.keys()
        assert not unknown, f"points that transformers' model does not have: {sorted(unknown)[:3]}"
        for name, activation in activations.items():
            assert activation.shape == expected[name].reshape(len(prompt), -1).shape, name
            size = max(float(expected[name].abs().max()), 1.0)
            rows = {name: (activation / size).flatten().numpy()}
            check_rows("activation", rows, {name: (expected[name] / size).flatten().numpy()}, self.bound(setup))
        weights = engine.run(engine.strategy.loaded_weights)
        for name, tensor in oracle.weights().items():
            assert name not in weights or np.array_equal(weights[name].float().numpy(), tensor.float().numpy()), name

    def test_the_top_tokens_of_a_prompt_equal_the_reference(self, engine: Engine, setup: Setup, oracle: Oracle) -> None:
        """Top-k logprobs `[P, K]` of a prompt must equal the reference's, best first, without temperature.

        Requests with different K share a prompt. The first token has none: zeros.
        """
        self.need(self.can.prompt_topk, "prompt_topk")
        prompt = self.prompt(20)
        requests = [
            ask(prompt, prompt_logprobs=True, prompt_topk=k, max_new_tokens=1, temperature=0.5) for k in (3, 5, 0)
        ]
        logprobs = log_softmax(oracle.logits(prompt))[:-1]
        for request, completion in zip(requests, engine.generate(*requests), strict=True):
            k, topk = request.prompt_topk, completion.prompt_topk
            assert (topk is None) == (k == 0), "top tokens of a prompt must be returned if requested, and only then"
            if topk is None:
                continue
            assert topk.ids.shape == topk.logprobs.shape == (len(prompt), k)
            assert not topk.ids[0].any()
            assert not topk.logprobs[0].any()
            at_ids = np.take_along_axis(logprobs, topk.ids[1:], axis=1).astype(np.float32)
            best = -np.sort(-logprobs, axis=1)[:, :k].astype(np.float32)
            for name, expected in (("of the returned ids", at_ids), ("of the best ids", best)):
                check_rows(f"logprob {name}", {"": topk.logprobs[1:]}, {"": expected}, self.bound(setup))
