"""Test group *sampling*: tokens come from the requested distribution, and seeds determine them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from roll_core.types import SamplingParams
from roll_testing.infer.engine import ask
from roll_testing.infer.exact import SampledTokens
from roll_testing.infer.kit import InferKit

if TYPE_CHECKING:
    from roll_core.types import Completion
    from roll_testing.infer.engine import Engine, Setup
    from roll_testing.infer.models import Oracle

NUM_PROMPTS, NUM_OUTPUTS, NUM_TOKENS = 8, 4, 40
"""1,280 tokens for each test of a distribution."""


class SamplingTests(InferKit):
    """Chi-square tests with a false alarm in a million, against probabilities computed from the reference's logits."""

    # -- distributions -------------------------------------------------------------------------------------------------

    def test_tokens_come_from_the_models_distribution(self, engine: Engine, setup: Setup, oracle: Oracle) -> None:
        """At temperature 1, tokens must come from the model's full distribution."""
        self._check(engine, setup, oracle, "", temperature=1.0)

    def test_temperature_divides_the_logits(self, engine: Engine, setup: Setup, oracle: Oracle) -> None:
        """Logits must be divided by the temperature before sampling: 0.5 sharpens the distribution."""
        self._check(engine, setup, oracle, "", temperature=0.5)

    def test_top_k_keeps_the_most_likely(self, engine: Engine, setup: Setup, oracle: Oracle) -> None:
        """Top-k must keep the k most likely tokens, here 4."""
        self._check(engine, setup, oracle, "top_k", top_k=4)

    def test_top_p_keeps_the_smallest_set_that_reaches_it(self, engine: Engine, setup: Setup, oracle: Oracle) -> None:
        """Top-p must keep the smallest set of tokens that reaches the mass, including the token that reaches it."""
        self._check(engine, setup, oracle, "top_p", top_p=0.5)

    def test_min_p_keeps_what_is_near_the_most_likely(self, engine: Engine, setup: Setup, oracle: Oracle) -> None:
        """Min-p must keep the tokens that are at least 0.3 times as likely as the most likely one."""
        self._check(engine, setup, oracle, "min_p", min_p=0.3)

    def test_parameters_apply_in_their_order(self, engine: Engine, setup: Setup, oracle: Oracle) -> None:
        """The order must be temperature, top-k, top-p of the remaining mass, min-p.

        A strategy may refuse to combine them.
        """
        self._check(engine, setup, oracle, "top_k top_p min_p", temperature=1.5, top_k=12, top_p=0.8, min_p=0.2)

    def test_the_repetition_penalty_is_that_of_ctrl(self, engine: Engine, setup: Setup, oracle: Oracle) -> None:
        """The repetition penalty must be that of CTRL.

        Logits of tokens in prompt or response are divided by it if positive, otherwise multiplied.
        """
        self.need_exact(setup)
        requests = [ask(self.prompt(4 + i), temperature=0.0, repetition_penalty=1.7) for i in range(4)]
        completions = self.generate_or_skip(engine, "repetition_penalty", *requests)
        for request, completion in zip(requests, completions, strict=True):
            self.check_greedy(oracle, request.prompt_ids, completion.outputs[0].token_ids, penalty=1.7)

    # -- seeds ---------------------------------------------------------------------------------------------------------

    def test_seeded_tokens_do_not_depend_on_the_batch(self, engine: Engine) -> None:
        """A seeded request must have the same tokens in a batch with others and by itself later."""
        self.need(self.can.seeds, "seeds")
        seeded = [ask(self.prompt(3 + i), n=2, seed=7 + i, max_new_tokens=24) for i in range(4)]
        crowd = [ask(self.prompt(2 + i), max_new_tokens=30 - i) for i in range(9)]
        together = engine.generate(*crowd[:5], *seeded, *crowd[5:])[5:9]
        for request, completion in zip(seeded, together, strict=True):
            alone = engine.generate(ask(request.prompt_ids, n=2, seed=request.params.seed, max_new_tokens=24))[0]
            assert _tokens(alone) == _tokens(completion), (
                f"seed {request.params.seed} gave tokens {_tokens(completion)} in a batch and {_tokens(alone)} alone"
            )

    def test_output_i_depends_on_the_seed_and_i(self, engine: Engine) -> None:
        """Output i must depend only on the seed and i, not on `n`.

        Output 1 of a seed must differ from output 0 of the next seed.
        """
        self.need(self.can.seeds, "seeds")
        prompt = self.prompt(4)
        wide, narrow, following = engine.generate(
            ask(prompt, n=4, seed=11, max_new_tokens=24),
            ask(prompt, n=2, seed=11, max_new_tokens=24),
            ask(prompt, n=2, seed=12, max_new_tokens=24),
        )
        assert _tokens(wide)[:2] == _tokens(narrow), (
            f"output 0 and 1 of seed 11 are {_tokens(narrow)} of 2 and {_tokens(wide)[:2]} of 4"
        )
        streams = [tuple(tokens) for tokens in (*_tokens(wide), *_tokens(following))]
        assert len(set(streams)) >= len(streams), f"outputs of seeds 11 and 12 repeat each other: {streams}"

    def test_requests_without_a_seed_differ(self, engine: Engine) -> None:
        """Requests without a seed must differ from each other, and so must the outputs of one request."""
        prompt = self.prompt(4)
        runs = [engine.generate(*[ask(prompt, n=2, max_new_tokens=24) for _ in range(3)]) for _ in range(2)]
        streams = [
            tuple(tokens) for completions in runs for completion in completions for tokens in _tokens(completion)
        ]
        assert len(set(streams)) >= len(streams), f"requests without a seed repeat each other: {streams}"

    # -- helpers -------------------------------------------------------------------------------------------------------

    def _check(self, engine: Engine, setup: Setup, oracle: Oracle, parameter: str, **params: Any) -> None:
        self.need_exact(setup)
        requests = [
            ask(
                self.prompt(4 + i, seed=i),
                n=NUM_OUTPUTS,
                max_new_tokens=NUM_TOKENS,
                seed=self.seed(engine, 1000 + i),
                **params,
            )
            for i in range(NUM_PROMPTS)
        ]
        sampled = SampledTokens(SamplingParams(**params))
        completions = self.generate_or_skip(engine, parameter, *requests) if parameter else engine.generate(*requests)
        for request, completion in zip(requests, completions, strict=True):
            for output in completion.outputs:
                before = [*request.prompt_ids.tolist(), *output.token_ids.tolist()[:-1]]
                sampled.add(oracle.logits(before)[len(request.prompt_ids) - 1 :], output.token_ids)
        sampled.check()


def _tokens(completion: Completion) -> list[list[int]]:
    return [output.token_ids.tolist() for output in completion.outputs]
