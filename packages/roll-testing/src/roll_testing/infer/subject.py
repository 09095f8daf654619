"""What is tested: what an author may say about an infer strategy, and what the layers of tests build on.

An engine may take long to start, so the tests of a class share one. A test finds it with the weights that the model was
stored with; one that failed leaves none behind: the next test starts another.
"""

from __future__ import annotations

import gc
import pickle
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pytest

from roll_core.errors import PluginError, UnsupportedError
from roll_core.spec.providers import InferCapabilities, InferProvider
from roll_testing.bounds import BOUNDS, check_rows
from roll_testing.infer.engine import Engine, Setup, ask
from roll_testing.infer.models import CLEAR, END, SMALL, Answers
from roll_testing.infer.trainer import trains_in
from roll_testing.models import write_checkpoint
from roll_testing.part import Part
from roll_testing.threads import one_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from roll_core.spec.infer import InferStrategy
    from roll_core.spec.model import ModelSpec
    from roll_core.types import Completion, GenerateRequest, TokenIds

VOCABULARY = 40
"""As many as the tokenizer has: each token is a character."""
SEEN = 2
"""A change of weights is seen if it moves a logprob by so many times the bound."""
TIGHT = 1024
"""Tokens whose keys and values an engine has room for with `tight_config`."""
FIRST_ORDINARY = 2
"""Ids below are padding and end."""


class InferSubject(Part):
    """One infer strategy under test. What has no underscore is for authors to override."""

    provider: InferProvider
    vocab_size: ClassVar[int] = VOCABULARY
    """Prompts are made of the tokens from 2 to so many."""
    context: ClassVar[int | None] = SMALL["max_position_embeddings"]
    """Tokens of the longest sequence that the engine takes, with this configuration and model; at least 512, or None
    where there is no limit."""
    end_ids: ClassVar[tuple[int, ...]] = (END,)
    """End tokens of the model; empty where it has none."""

    train_strategy: ClassVar[str] = "hf_train"
    """The train strategy with whose logprobs the engine's are compared; empty where none computes the model."""
    adapter_config: ClassVar[Mapping[str, Any]] = {}
    """What a strategy that declares `lora` needs in its configuration to serve adapters."""

    tight_config: ClassVar[Mapping[str, Any]] = {}
    """What in its configuration leaves an engine no more room than for keys and values of `TIGHT` tokens; empty where
    it has no such limit. With the default model a token takes 1,024 bytes in fp32."""

    _kind = InferProvider

    def model(self, folder: Path) -> ModelSpec:
        """A small language model in float32; files go into `folder`. A Qwen3 as transformers stores it, by default."""
        return write_checkpoint(folder, SMALL, task="causal_lm", vocab_size=self.vocab_size)

    def processes(self, strategy: InferStrategy) -> Sequence[int]:
        """Ids of the processes that a started engine has beside this one, to be killed. None by default."""
        return ()

    # -- what is declared ----------------------------------------------------------------------------------------------

    @property
    def can(self) -> InferCapabilities:
        """What the record declares."""
        return self.provider.capabilities

    def need_exact(self, setup: Setup) -> None:
        """Skip where numbers are too coarse to tell a mistake from rounding."""
        if setup.model.dtype != "fp32":
            pytest.skip(f"{self.name} does not compute in fp32 here, and coarser numbers decide nothing")

    def need_trainer(self, setup: Setup) -> None:
        """Skip where no train strategy computes the model in its dtype."""
        self.need(bool(self.train_strategy), "a train strategy for its model")
        if not trains_in(self.train_strategy, setup.model.dtype):
            pytest.skip(f"{self.train_strategy} does not compute in {setup.model.dtype}")

    # -- pytest --------------------------------------------------------------------------------------------------------

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Tests that name one of these run for each that there is: `low_dtype` is what is not fp32."""
        try:
            values: dict[str, Sequence[Any]] = {
                "low_dtype": [dtype for dtype in self.dtypes() if dtype != "fp32"],
                "transport": self.can.weight_transports,
            }
        except PluginError:  # the test that looks the name up says what is wrong with it
            values = {"low_dtype": (), "transport": ()}
        for name in metafunc.fixturenames:
            if name == "variant":  # one engine is started after the other, not one for each test
                metafunc.parametrize(name, list(self.variants), scope="class")
            elif name in values:
                metafunc.parametrize(name, values[name])

    @pytest.fixture
    def setup(self, strategy_config: Mapping[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Setup:
        """The strategy and its model, in fp32 where it has that."""
        self._engine_or_skip()
        platform = self.platform_here()
        models = self._once("models")
        if "model" not in models:
            models["model"] = self.model(tmp_path_factory.mktemp("model"))
        dtypes = self.dtypes()
        model: ModelSpec = models["model"]
        if "fp32" not in dtypes:
            model = replace(model, dtype=dtypes[0])
        return Setup(
            provider=self.provider,
            strategy_config=strategy_config,
            model=model,
            device=platform.device(0),
            backend=platform.collective_backend,
            timeout_s=self.timeout_s,
        )

    @pytest.fixture
    def answers(self, setup: Setup) -> Answers:
        """The reference, with the weights that the model was stored with."""
        found = self.answers_of(setup.model)
        found.take(self.stored(setup))
        return found

    @pytest.fixture
    def engine(self, setup: Setup, answers: Answers, request: pytest.FixtureRequest) -> Iterator[Engine]:
        """The engine that all tests share, with the weights that the model was stored with."""
        live, key = self._once("engine"), pickle.dumps(setup)
        if live.get("key") != key:
            self._stop_shared()
            started = Engine(setup)
            live.update(engine=started)
            started.start()
            live.update(key=key)
        engine: Engine = live["engine"]
        self._restore(engine, setup)
        failed = request.session.testsfailed
        yield engine
        if request.session.testsfailed > failed or request.node.get_closest_marker("xfail"):
            self._stop_shared()

    @pytest.fixture
    def fresh(self) -> Iterator[Callable[[Setup], Engine]]:
        """`fresh(setup)`, an engine that is not started yet. It is alone: the shared one is stopped."""
        self._stop_shared()
        made: list[Engine] = []

        def make(setup: Setup) -> Engine:
            made.append(Engine(setup))
            return made[-1]

        yield make
        for each in made:
            each.close()

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _on_one_thread(cls) -> Iterator[None]:
        with one_thread():
            yield
            try:
                cls._stop_shared()
            finally:
                gc.collect()  # an error here is reported while garbage may be collected, see `Part`

    @classmethod
    def _stop_shared(cls) -> None:
        live = cls._once("engine")
        engine = live.pop("engine", None)
        live.clear()
        if engine is not None:
            engine.close()

    # -- asking --------------------------------------------------------------------------------------------------------

    def answers_of(self, model: ModelSpec) -> Answers:
        """The reference for a model, loaded once."""
        known, key = self._once("answers"), pickle.dumps(model)
        if key not in known:
            known[key] = Answers(self.reference_model(model))
        found: Answers = known[key]
        return found

    def stored(self, setup: Setup) -> dict[str, Tensor]:
        """The weights that the model was stored with."""
        known, key = self._once("stored"), pickle.dumps(setup.model)
        if key not in known:
            known[key] = self.answers_of(setup.model).weights()
        found: dict[str, Tensor] = known[key]
        return found

    def _restore(self, engine: Engine, setup: Setup) -> None:
        """Give it the weights that the model was stored with, if it has others."""
        if not engine.pristine:
            engine.publish(self.published(self.stored(setup), setup.model))
            engine.pristine = True

    def prompt(self, num: int, seed: int = 0) -> TokenIds:
        """Random ordinary tokens."""
        return np.random.default_rng((seed, num)).integers(FIRST_ORDINARY, self.vocab_size, num)

    def bound(self, setup: Setup) -> float:
        """Largest difference of a logprob to the reference's."""
        return BOUNDS[setup.model.dtype].outputs

    def published(self, weights: Mapping[str, Tensor], model: ModelSpec) -> dict[str, Tensor]:
        """In the dtype in which the engine holds them, as a run sends them."""
        from roll_modeling.model import DTYPES

        return {name: each.to(DTYPES[model.dtype]) for name, each in weights.items()}

    def answered(self, engine: Engine, parameter: str, *requests: GenerateRequest) -> list[Completion]:
        """The completions; a skip where the strategy refuses the parameter, as it may if it says so by name."""
        try:
            return engine.generate(*requests)
        except UnsupportedError as error:
            if parameter not in str(error):
                raise AssertionError(f"{parameter} was refused without being named: {error}") from error
            pytest.skip(f"{self.name} refuses {parameter}: {error}")

    def seed(self, engine: Engine, number: int) -> int | None:
        """A seed where the strategy takes seeds, so that a test has the same outcome every time."""
        known = self._once("seeds")
        if "taken" not in known:
            try:
                engine.generate(ask(self.prompt(2), seed=0, max_new_tokens=1))
                known["taken"] = True
            except UnsupportedError:
                known["taken"] = False
        return number if known["taken"] else None

    # -- judging -------------------------------------------------------------------------------------------------------

    def check_logprobs(
        self,
        setup: Setup,
        answers: Answers,
        requests: Sequence[GenerateRequest],
        completions: Sequence[Completion],
        *,
        until: int | None = None,
    ) -> None:
        """Fail unless each drawn token has the logprob that the reference gives it; of the first `until` tokens."""
        found, expected = {}, {}
        for request, completion in zip(requests, completions, strict=True):
            for index, output in enumerate(completion.outputs):
                key = f"{request.id}, output {index}"
                right = answers.logprobs(request.prompt_ids, output.token_ids, request.params.temperature)
                found[key], expected[key] = output.logprobs[:until], right[:until]
        check_rows("logprob", found, expected, self.bound(setup))

    def check_greedy(self, answers: Answers, prompt: TokenIds, response: TokenIds, **rules: Any) -> None:
        """Fail unless each token is the most likely one, but for rounding; `rules` as `Answers.shortfall` has them."""
        below, _ = answers.shortfall(prompt, response, **rules)
        wrong = np.flatnonzero(below > CLEAR)
        if len(wrong):
            raise AssertionError(
                f"token {wrong[0]} of the response {response.tolist()} to {prompt.tolist()} is not the most likely one:"
                f" its logit is {below[wrong[0]]:.3g} below the largest"
            )

    def check_answers(
        self,
        engine: Engine,
        setup: Setup,
        answers: Answers,
        weights: Mapping[str, Tensor] | None = None,
        *,
        prompts: Sequence[TokenIds] = (),
    ) -> None:
        """Fail unless the engine answers as the reference does with `weights`, if given, and not as it did before; and
        with the version that was published last."""
        asked = prompts or (self.prompt(30), self.prompt(6))
        requests = [ask(each, max_new_tokens=8, seed=self.seed(engine, 3)) for each in asked]
        found = engine.generate(*requests)
        tokens = requests[0].prompt_ids, found[0].outputs[0].token_ids
        before = answers.logprobs(*tokens)
        if weights is not None:
            answers.take(weights)
            if float(np.abs(answers.logprobs(*tokens) - before).max()) < SEEN * self.bound(setup):
                raise AssertionError("the reference answers as before: the change is too small to be seen")
        self.check_logprobs(setup, answers, requests, found)
        for completion in found:
            versions = {int(each) for output in completion.outputs for each in output.versions}
            if versions != {engine.version}:
                raise AssertionError(f"tokens are of weight version {sorted(versions)}, published was {engine.version}")
