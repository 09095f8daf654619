"""`TrainKit`: what an author configures about a train strategy, and the helpers that the test groups share."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import pytest

from roll_core.errors import PluginError
from roll_core.spec.providers import PlatformProvider, TrainCapabilities, TrainProvider
from roll_testing.kit import Kit, one_thread, registry
from roll_testing.losses import GRADIENT
from roll_testing.models import LARGE, QWEN3, make_batch, write_checkpoint
from roll_testing.ranks import free_port, shared_host

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    import torch
    from torch import nn

    from roll_core.spec.model import ModelSpec
    from roll_core.spec.providers import Task
    from roll_core.spec.train import TrainingSpec, WantedOutputs
    from roll_core.types import Floats, TrainSequence
    from roll_testing.bench import Case, ModuleStep, Split, Step
    from roll_testing.programs import Trained
    from roll_testing.reference import Reference


class TrainKit(Kit):
    """One train strategy under test. Authors override class attributes and methods without a leading underscore."""

    provider: TrainProvider
    world_sizes: ClassVar[tuple[int, ...] | None] = None
    """Numbers of ranks to test on. Default: 1 and 2 if data parallelism is declared, otherwise 1."""
    ranks_of: ClassVar[Mapping[str, tuple[int, ...]]] = {}
    """Numbers of ranks for variants that need others than `world_sizes`: `{"tp 2": (2, 4)}`. If 1 is not among them,
    tests without a `world_size` parameter use the smallest number. Single-rank computations then use the first variant
    that runs on one rank."""
    parallelism: ClassVar[Mapping[str, str]] = {}
    """Variant that tests a declared kind of parallelism: `{"tensor_parallel": "tp 2"}`. Several suites of one strategy
    may each cover some of the kinds."""
    environment: ClassVar[Mapping[str, str]] = {}
    """Environment variables of the rank processes, set before anything is imported."""
    preload: ClassVar[tuple[str, ...]] = (
        "packaging.requirements",
        "torch._dynamo",
        "transformers.optimization",
        "transformers.models.auto.modeling_auto",
        "transformers.models.qwen3.modeling_qwen3",
        "safetensors.torch",
    )
    """Modules imported once for all ranks, which saves half a second per test. Authors may add modules that start no
    threads and use no device."""
    isolate: ClassVar[bool] = True
    """Run each test in its own processes. False runs single-rank tests in pytest's process: faster, and a debugger
    works, but a strategy that leaves state behind affects the tests after it."""
    vocab_size: ClassVar[int] = 61
    """Vocabulary size. Test tokens are sampled from `[0, vocab_size)`."""
    gradient_training: ClassVar[TrainingSpec | None] = GRADIENT
    """Settings under which one step moves each weight by `-MAGNIFIED` (1,000) times its gradient, so that gradients can
    be read off exported weights. None if the strategy's optimizer has no such settings; the kit then compares a step
    and its gradient norm instead."""

    def optimizers(
        self, parameters: Mapping[str, nn.Parameter], training: TrainingSpec
    ) -> Sequence[torch.optim.Optimizer]:
        """Build torch optimizers on the reference's parameters that are equivalent to the strategy's.

        Default: AdamW. The kit clips the gradients and sets the learning rates. Steps must report the learning rate of
        the first optimizer.
        """
        from roll_testing.reference import adamw

        return adamw(parameters, training)

    def model(self, task: Task, folder: Path) -> ModelSpec:
        """Write a small float32 model for this task into `folder` and return its spec.

        Default: a Qwen3 of transformers.
        """
        return write_checkpoint(folder, QWEN3, task=task, vocab_size=self.vocab_size)

    def large_model(self, folder: Path) -> ModelSpec:
        """Write a language model of tens of MB, which is large compared with a device's allocation granularity."""
        return write_checkpoint(folder, LARGE, task="causal_lm", vocab_size=self.vocab_size)

    # -- capabilities --------------------------------------------------------------------------------------------------

    @property
    def can(self) -> TrainCapabilities:
        """Capabilities that the strategy declares."""
        return self.provider.capabilities

    def sizes(self, variant: str = "") -> tuple[int, ...]:
        """Return the numbers of ranks that a variant runs on."""
        if variant in self.ranks_of:
            return self.ranks_of[variant]
        if self.world_sizes is not None:
            return self.world_sizes
        return (1, 2) if self.can.data_parallel else (1,)

    # -- pytest --------------------------------------------------------------------------------------------------------

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Parametrize tests over variants, numbers of ranks, tasks and dtypes.

        `world_size` takes all numbers of ranks, `several` those above 1. `scalar_task` takes the tasks with a scalar
        head, `low_dtype` the dtypes other than fp32. Without the engine each test is generated once, to be skipped.
        """
        try:
            values: dict[str, Sequence[Any]] = {
                "variant": list(self.variants),
                "world_size": [(variant, size) for variant in self.variants for size in self.sizes(variant)],
                "several": [(variant, size) for variant in self.variants for size in self.sizes(variant) if size > 1],
                "task": [task for task in self.can.tasks if task != "flow"],
                "scalar_task": [task for task in self.can.tasks if task in ("value", "reward")],
                "low_dtype": [dtype for dtype in self.dtypes() if dtype != "fp32"],
            }
            if self._missing_engine():
                values = {name: options[:1] for name, options in values.items()}
        except PluginError:  # `test_it_is_found_by_its_name` reports this error
            values = dict.fromkeys(("world_size", "several", "task", "scalar_task", "low_dtype"), ())
            values["variant"] = list(self.variants)
        fixtures = set(metafunc.fixturenames)
        if sized := fixtures & {"world_size", "several"}:
            (name,) = sized
            metafunc.parametrize(("variant", name), values[name])
        elif "variant" in fixtures:
            metafunc.parametrize("variant", values["variant"])
        for name in ("task", "scalar_task", "low_dtype"):
            if name in fixtures:
                metafunc.parametrize(name, values[name])

    @pytest.fixture(autouse=True)
    def _engine_is_here(self, request: pytest.FixtureRequest) -> None:
        if "case" in request.fixturenames:
            self._engine_or_skip()

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _on_one_thread(cls) -> Iterator[None]:
        with one_thread():
            yield

    @pytest.fixture
    def models(self, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Task | Literal["large"]], ModelSpec]:
        """`models(task)` returns the model for a task, or for `"large"`. Each model is written once per test class."""

        def made(which: Task | Literal["large"]) -> ModelSpec:
            written = self._once("models")
            if which not in written:
                folder = tmp_path_factory.mktemp(f"model-{which}")
                written[which] = self.large_model(folder) if which == "large" else self.model(which, folder)
            spec: ModelSpec = written[which]
            return spec

        return made

    @pytest.fixture
    def case(
        self,
        variant: str,
        strategy_config: Mapping[str, Any],
        models: Callable[[Task], ModelSpec],
        request: pytest.FixtureRequest,
    ) -> Case:
        """The strategy with an fp32 model and without an optimizer.

        The model has the test's task, by default `causal_lm`. Tests modify the case by `with_`.
        """
        from roll_testing.bench import Case

        platform = self.platform_here()
        values = getattr(getattr(request.node, "callspec", None), "params", {})
        size = int(values.get("several", values.get("world_size", min(self.sizes(variant)))))
        if size > platform.device_count() and not platform.slots_share_cores:
            pytest.skip(f"{size} ranks need as many slots; platform {platform.name} has {platform.device_count()}")
        return Case(
            provider=self.provider,
            strategy_config=strategy_config,
            config_alone=strategy_config if self._runs_alone(variant) else self._config_alone(),
            model=models(values.get("scalar_task", values.get("task", "causal_lm"))),
            training=None,
            world_size=size,
            backend=platform.collective_backend,
            devices=tuple(platform.device(0 if platform.slots_share_cores else rank) for rank in range(size)),
            platform_target=self._platform_target(platform.name),
            timeout_s=self.timeout_s,
        )

    # -- running -------------------------------------------------------------------------------------------------------

    def run(self, function: Callable[..., Any], case: Case, *arguments: Any) -> tuple[Any, ...]:
        """Run `function(rank, case, *arguments)` on every rank and return the results in rank order.

        Results of equal calls are cached, because a strategy's results must not depend on when it is called.
        """
        key, answers = pickle.dumps((function, case, arguments)), self._once("answers")
        if key not in answers and case.world_size == 1 and not self.isolate:
            answers[key] = (function(0, case, *arguments),)
        if key not in answers:
            with_port = case.with_(master_port=free_port() if case.world_size > 1 else 0)
            host = shared_host(tuple(sorted(self.environment.items())), self.preload)
            answers[key] = host.run(
                function, with_port, *arguments, num_ranks=case.world_size, timeout_s=self.timeout_s
            )
        result: tuple[Any, ...] = answers[key]
        return result

    def scored(
        self, case: Case, sequences: Sequence[TrainSequence], want: WantedOutputs, split: Split
    ) -> dict[str, dict[str, Floats]]:
        """Return outputs of the whole batch, gathered from the leaders, by output name and then by sequence id."""
        from roll_testing.programs import score

        scores: dict[str, dict[str, Floats]] = {}
        for answer in self.run(score, case, sequences, want, split):
            for name, rows in answer.items():
                scores.setdefault(name, {}).update(rows)
        return scores

    def trained(self, case: Case, training: TrainingSpec, steps: Sequence[Step | ModuleStep]) -> Trained:
        """Run optimizer steps on all ranks.

        Return rank 0's statistics, metrics summed over all leaders, and the weights.
        """
        from roll_testing.programs import train

        self.need_training()
        answers: list[Trained] = list(self.run(train, case.with_(training=training), steps))
        leaders = [answer for answer in answers if answer.data_rank.leader]
        together = [
            {name: sum(answer.metrics[i].get(name, 0.0) for answer in leaders) for name in _names(leaders, i)}
            for i in range(len(steps))
        ]
        source = next(answer for answer in answers if answer.data_rank.index == 0 and answer.data_rank.leader)
        return replace(source, stats=answers[0].stats, metrics=tuple(together))

    def reference(self, case: Case) -> Reference:
        """Return the reference for the case's model."""
        from roll_testing.reference import Reference

        return Reference(self.reference_model(case.model), case.model.task, self.optimizers)

    def batch(self, seed: int = 0) -> list[TrainSequence]:
        """Return a batch of sequences of different lengths."""
        return make_batch(self.vocab_size, seed=seed)

    def need_training(self) -> None:
        """Skip the test if the strategy is forward-only."""
        self.need(not self.provider.forward_only, "training: it is forward-only")

    def _on_one(self, case: Case) -> Case:
        return case.with_(world_size=1, devices=case.devices[:1], strategy_config=case.config_alone)

    def _runs_alone(self, variant: str) -> bool:
        """True if the variant runs on one rank.

        `world_sizes` states what is tested; only `ranks_of` states what a variant needs.
        """
        return 1 in self.ranks_of.get(variant, (1,))

    def _config_alone(self) -> Mapping[str, Any]:
        for variant, config in self.variants.items():
            if self._runs_alone(variant):
                return config
        pytest.fail(f"{type(self).__name__}: none of the variants {', '.join(self.variants)} runs on one rank")

    def _platform_target(self, name: str) -> str:
        return next(platform.target for platform in registry().providers(PlatformProvider) if platform.name == name)


def _names(answers: Sequence[Trained], step: int) -> list[str]:
    return sorted({name for answer in answers for name in answer.metrics[step]})
