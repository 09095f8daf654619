"""`InferKit`: what an author configures about an infer strategy, and the helpers that the test groups share.

Starting an engine may be slow, so the tests of a class share one. Each test gets the engine with the weights that the
model was stored with. After a failed test the engine is stopped, and the next test starts another.
"""

from __future__ import annotations

import gc
import pickle
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pytest

from roll_core.errors import PluginError, UnsupportedError
from roll_core.spec.model import LoraSpec
from roll_core.spec.providers import InferCapabilities, InferProvider
from roll_testing.bounds import BOUNDS, check_rows
from roll_testing.infer.engine import Engine, Setup, ask
from roll_testing.infer.models import CLEAR, END, SMALL, Oracle
from roll_testing.infer.trainer import trains_in
from roll_testing.kit import Kit, one_thread
from roll_testing.models import write_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from roll_core.spec.infer import InferStrategy
    from roll_core.spec.model import ModelSpec
    from roll_core.types import Completion, GenerateRequest, TokenIds

VOCABULARY = 40
"""Size of the tokenizer's vocabulary; each token is a character."""
SEEN = 2
"""A change of weights is visible if it moves a logprob by at least this many times the bound."""
TIGHT = 1024
"""Tokens that fit into the KV cache with `tight_config`."""
RANK = 3
"""Rank of adapters: not a power of two, and smaller than the rank that engines make room for."""
FIRST_ORDINARY = 2
"""Smaller ids are padding and end."""


class InferKit(Kit):
    """One infer strategy under test. Authors override class attributes and methods without a leading underscore."""

    provider: InferProvider
    vocab_size: ClassVar[int] = VOCABULARY
    """Prompts are sampled from the tokens 2 to `vocab_size - 1`."""
    context: ClassVar[int | None] = SMALL["max_position_embeddings"]
    """Length of the longest sequence that the engine accepts with this configuration and model, in tokens. At least
    512, or None if there is no limit."""
    end_ids: ClassVar[tuple[int, ...]] = (END,)
    """End tokens of the model; empty if it has none."""

    train_strategy: ClassVar[str] = "hf_train"
    """Train strategy whose logprobs are compared with the engine's; empty if none supports the model."""
    adapter_config: ClassVar[Mapping[str, Any]] = {}
    """Configuration that a strategy with `lora` needs in addition to serve adapters."""

    tight_config: ClassVar[Mapping[str, Any]] = {}
    """Configuration that limits the engine's KV cache to `TIGHT` tokens; empty if the engine has no such limit. With
    the default model a token takes 1,024 bytes in fp32."""

    _kind = InferProvider

    def model(self, folder: Path) -> ModelSpec:
        """Write a small float32 language model into `folder` and return its spec. Default: a Qwen3 of transformers."""
        return write_checkpoint(folder, SMALL, task="causal_lm", vocab_size=self.vocab_size)

    def processes(self, strategy: InferStrategy) -> Sequence[int]:
        """Return the ids of the processes that a started engine has beside this one.

        A test kills them. Default: none.
        """
        return ()

    # -- capabilities --------------------------------------------------------------------------------------------------

    @property
    def can(self) -> InferCapabilities:
        """Capabilities that the strategy declares."""
        return self.provider.capabilities

    def need_exact(self, setup: Setup) -> None:
        """Skip the test unless it runs in fp32: in lower precision, rounding could hide a mistake."""
        if setup.model.dtype != "fp32":
            pytest.skip(f"{self.name} does not support fp32 here, and rounding in lower precision could hide a mistake")

    def need_trainer(self, setup: Setup) -> None:
        """Skip the test if no train strategy supports the model in its dtype."""
        self.need(bool(self.train_strategy), "a train strategy for its model")
        if not trains_in(self.train_strategy, setup.model.dtype):
            pytest.skip(f"{self.train_strategy} does not compute in {setup.model.dtype}")

    # -- pytest --------------------------------------------------------------------------------------------------------

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Parametrize tests over variants, transports and dtypes. `low_dtype` takes the dtypes other than fp32."""
        try:
            values: dict[str, Sequence[Any]] = {
                "low_dtype": [dtype for dtype in self.dtypes() if dtype != "fp32"],
                "transport": self.can.weight_transports,
            }
        except PluginError:  # `test_it_is_found_by_its_name` reports this error
            values = {"low_dtype": (), "transport": ()}
        for name in metafunc.fixturenames:
            if name == "variant":  # one engine for each variant, not for each test
                metafunc.parametrize(name, list(self.variants), scope="class")
            elif name in values:
                metafunc.parametrize(name, values[name])

    @pytest.fixture
    def setup(self, strategy_config: Mapping[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Setup:
        """The strategy and its model, in fp32 if supported, otherwise in the first supported dtype."""
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
    def oracle(self, setup: Setup) -> Oracle:
        """The reference, with the weights that the model was stored with."""
        oracle = self.oracle_of(setup.model)
        oracle.take(self.stored(setup))
        return oracle

    @pytest.fixture
    def engine(self, setup: Setup, oracle: Oracle, engine_of: Callable[[Setup], Engine]) -> Engine:
        """The shared engine, with the weights that the model was stored with."""
        engine = engine_of(setup)
        self._restore(engine, setup)
        return engine

    @pytest.fixture
    def engine_of(self, request: pytest.FixtureRequest) -> Iterator[Callable[[Setup], Engine]]:
        """`engine_of(setup)` returns the shared engine with the weights that it has; another setup starts another."""
        failed = request.session.testsfailed
        yield self._running
        if request.session.testsfailed > failed or request.node.get_closest_marker("xfail"):
            self._stop_shared()

    @pytest.fixture
    def doomed(self) -> Iterator[Callable[[Setup], Engine]]:
        """`doomed(setup)` returns a started engine that the test may stop or kill.

        It is the shared engine, for the last time, even if that has another setup. Otherwise another is started.
        """
        taken: list[Engine] = []

        def take(setup: Setup) -> Engine:
            live = self._once("engine")
            taken.append(live["engine"] if "key" in live else self._running(setup))
            live.clear()
            return taken[-1]

        yield take
        for engine in taken:
            engine.close()

    @pytest.fixture
    def fresh(self) -> Iterator[Callable[[Setup], Engine]]:
        """`fresh(setup)` returns an engine that is not started yet. The shared engine is stopped first."""
        self._stop_shared()
        made: list[Engine] = []

        def make(setup: Setup) -> Engine:
            made.append(Engine(setup))
            return made[-1]

        yield make
        for engine in made:
            engine.close()

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _on_one_thread(cls) -> Iterator[None]:
        with one_thread():
            yield
            try:
                cls._stop_shared()
            finally:
                gc.collect()  # collect now: an error here is reported with collection enabled, see `Kit`

    def _running(self, setup: Setup) -> Engine:
        live, key = self._once("engine"), pickle.dumps(setup)
        if live.get("key") != key:
            self._stop_shared()
            started = Engine(setup)
            live.update(engine=started)
            started.start()
            live.update(key=key)
        engine: Engine = live["engine"]
        return engine

    @classmethod
    def _stop_shared(cls) -> None:
        live = cls._once("engine")
        engine = live.pop("engine", None)
        live.clear()
        if engine is not None:
            engine.close()

    # -- helpers -------------------------------------------------------------------------------------------------------

    def _unpublished(self, engine_of: Callable[[Setup], Engine], setup: Setup) -> Engine:
        """Return the shared engine before its first publish; start another one if it has received any."""
        engine = engine_of(setup)
        if engine.pristine and not engine.version:
            return engine
        self._stop_shared()
        return engine_of(setup)

    def _with_adapters(self, setup: Setup) -> Setup:
        """Return the setup of an engine that can load adapters, with `tight_config` if there is one.

        Tests of adapters and of a small KV cache then share an engine.
        """
        lora = LoraSpec(targets=("all-linear",), rank=RANK, alpha=float(RANK))
        return setup.with_(
            model=replace(setup.model, lora=lora),
            strategy_config={**setup.strategy_config, **self.tight_config, **self.adapter_config},
        )

    def oracle_of(self, model: ModelSpec) -> Oracle:
        """Return the reference for a model, loaded once."""
        known, key = self._once("reference"), pickle.dumps(model)
        if key not in known:
            known[key] = Oracle(self.reference_model(model))
        oracle: Oracle = known[key]
        return oracle

    def stored(self, setup: Setup) -> dict[str, Tensor]:
        """Return the weights that the model was stored with."""
        known, key = self._once("stored"), pickle.dumps(setup.model)
        if key not in known:
            known[key] = self.oracle_of(setup.model).weights()
        weights: dict[str, Tensor] = known[key]
        return weights

    def _restore(self, engine: Engine, setup: Setup) -> None:
        """Publish the weights that the model was stored with, if the engine has others."""
        if not engine.pristine:
            engine.publish(self.published(self.stored(setup), setup.model))
            engine.pristine = True

    def prompt(self, num: int, seed: int = 0) -> TokenIds:
        """Return `num` random ordinary tokens."""
        return np.random.default_rng((seed, num)).integers(FIRST_ORDINARY, self.vocab_size, num)

    def bound(self, setup: Setup) -> float:
        """Return the largest allowed difference of a logprob to the reference's."""
        return BOUNDS[setup.model.dtype].outputs

    def published(self, weights: Mapping[str, Tensor], model: ModelSpec) -> dict[str, Tensor]:
        """Return the weights in the model's dtype, as a run sends them."""
        from roll_modeling.model import DTYPES

        return {name: tensor.to(DTYPES[model.dtype]) for name, tensor in weights.items()}

    def generate_or_skip(self, engine: Engine, parameter: str, *requests: GenerateRequest) -> list[Completion]:
        """Return the completions. Skip the test if the strategy refuses `parameter` by name; other refusals fail.

        `parameter` may have several names, separated by blanks, of which the error has one.
        """
        try:
            return engine.generate(*requests)
        except UnsupportedError as error:
            if not any(name in str(error) for name in parameter.split()):
                raise AssertionError(f"{parameter} was refused by an error without its name: {error}") from error
            pytest.skip(f"{self.name} refuses {parameter}: {error}")

    def seed(self, engine: Engine, number: int) -> int | None:
        """Return `number` if the strategy declares `seeds`, otherwise None.

        With a seed, a test has the same outcome every time.
        """
        return number if self.can.seeds else None

    # -- checks --------------------------------------------------------------------------------------------------------

    def check_logprobs(
        self,
        setup: Setup,
        oracle: Oracle,
        requests: Sequence[GenerateRequest],
        completions: Sequence[Completion],
        *,
        until: int | None = None,
    ) -> None:
        """Fail unless each sampled token has the reference's logprob.

        `until` limits the check to the first tokens of each output.
        """
        actual, expected = {}, {}
        for request, completion in zip(requests, completions, strict=True):
            for index, output in enumerate(completion.outputs):
                key = f"{request.id}, output {index}"
                right = oracle.logprobs(request.prompt_ids, output.token_ids, request.params.temperature)
                actual[key], expected[key] = output.logprobs[:until], right[:until]
        check_rows("logprob", actual, expected, self.bound(setup))

    def check_greedy(self, oracle: Oracle, prompt: TokenIds, response: TokenIds, **rules: Any) -> None:
        """Fail unless each token is the most likely one, up to rounding.

        `rules` are arguments of `Oracle.shortfall`.
        """
        below, _ = oracle.shortfall(prompt, response, **rules)
        wrong = np.flatnonzero(below > CLEAR)
        assert not wrong.size, (
            f"token {wrong[0]} of the response {response.tolist()} to {prompt.tolist()} is not the most likely one:"
            f" its logit is {below[wrong[0]]:.3g} below the largest"
        )

    def check_outputs(
        self,
        engine: Engine,
        setup: Setup,
        oracle: Oracle,
        weights: Mapping[str, Tensor] | None = None,
        *,
        prompts: Sequence[TokenIds] = (),
    ) -> None:
        """Fail unless tokens have the reference's logprobs and the version of the last publish.

        If `weights` is given, they are loaded into the reference first. The test fails if that does not change its
        logprobs visibly.
        """
        asked = prompts or (self.prompt(30), self.prompt(6))
        requests = [ask(prompt, max_new_tokens=8, seed=self.seed(engine, 3)) for prompt in asked]
        completions = engine.generate(*requests)
        tokens = requests[0].prompt_ids, completions[0].outputs[0].token_ids
        before = oracle.logprobs(*tokens)
        if weights is not None:
            oracle.take(weights)
            assert float(np.abs(oracle.logprobs(*tokens) - before).max()) >= SEEN * self.bound(setup), (
                "the new weights hardly change the logprobs of the reference: change them more"
            )
        self.check_logprobs(setup, oracle, requests, completions)
        for completion in completions:
            versions = {int(version) for output in completion.outputs for version in output.versions}
            assert versions == {engine.version}, (
                f"tokens have weight versions {sorted(versions)}, expected {engine.version}"
            )
