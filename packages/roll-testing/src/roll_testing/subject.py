"""What is tested, and how: what an author may say about a strategy, and what the layers of tests build on."""

from __future__ import annotations

import pickle
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import pytest

from roll_core.errors import PluginError
from roll_core.spec.providers import PlatformProvider, TrainCapabilities, TrainProvider
from roll_testing.losses import GRADIENT
from roll_testing.models import LARGE, QWEN3, make_batch, write_checkpoint
from roll_testing.part import Part, registry
from roll_testing.ranks import RankHost, free_port
from roll_testing.threads import one_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    import torch
    from torch import nn

    from roll_core.spec.model import ModelSpec
    from roll_core.spec.providers import Task
    from roll_core.spec.train import TrainingSpec, Want
    from roll_core.types import Floats, TrainSequence
    from roll_testing.bench import Case, Split, Step
    from roll_testing.programs import Trained
    from roll_testing.reference import Reference


class Subject(Part):
    """One train strategy under test. Class attributes and methods without an underscore are for authors to override."""

    provider: TrainProvider
    world_sizes: ClassVar[tuple[int, ...] | None] = None
    """Numbers of ranks; 1 and 2 where data parallelism is declared, else 1."""
    ranks_of: ClassVar[Mapping[str, tuple[int, ...]]] = {}
    """Numbers of ranks of variants that need others than `world_sizes`: `{"tp 2": (2, 4)}`. Where 1 is not among them,
    tests that use one rank take the smallest number, and what is computed there is compared with one rank of the first
    variant that runs on one."""
    parallelism: ClassVar[Mapping[str, str]] = {}
    """Which variant shows a kind of parallelism that is declared: `{"tensor_parallel": "tp 2"}`. Several suites of one
    strategy may share them out among themselves."""
    environment: ClassVar[Mapping[str, str]] = {}
    """Variables of the ranks' processes, set before anything is imported there."""
    preload: ClassVar[tuple[str, ...]] = (
        "torch._dynamo",
        "transformers.optimization",
        "transformers.models.auto.modeling_auto",
        "transformers.models.qwen3.modeling_qwen3",
        "safetensors.torch",
    )
    """Imported once for all ranks: half a second of each test. To be added to; what stands here must start no threads
    and touch no device."""
    isolate: ClassVar[bool] = True
    """Each test on processes of its own; False computes on one rank in this process: quick, and a debugger works, but a
    strategy that leaves something behind disturbs the tests after it."""
    vocab_size: ClassVar[int] = 61
    """Tokens are drawn from so many."""
    gradient_training: ClassVar[TrainingSpec | None] = GRADIENT
    """Settings under which one step moves each weight by `-MAGNIFIED` (1,000) times its gradient, so that gradients can
    be read off exported weights. None if the strategy's optimizer has no such settings: a step, and the norm of its
    gradient, are then compared instead."""

    def optimizers(
        self, parameters: Mapping[str, nn.Parameter], training: TrainingSpec
    ) -> Sequence[torch.optim.Optimizer]:
        """What the strategy steps with, by plain torch on the reference's parameters: AdamW by default. The kit clips
        the gradients and sets the learning rates; the first optimizer's is the one that steps report."""
        from roll_testing.reference import adamw

        return adamw(parameters, training)

    def model(self, task: Task, folder: Path) -> ModelSpec:
        """A small model of this task in float32; files go into `folder`. A checkpoint of transformers by default."""
        return write_checkpoint(folder, QWEN3, task=task, vocab_size=self.vocab_size)

    def large_model(self, folder: Path) -> ModelSpec:
        """A language model whose weights stand out from what a device allocates at once: tens of MB."""
        return write_checkpoint(folder, LARGE, task="causal_lm", vocab_size=self.vocab_size)

    # -- what is declared ----------------------------------------------------------------------------------------------

    @property
    def can(self) -> TrainCapabilities:
        """What the record declares."""
        return self.provider.capabilities

    def sizes(self, variant: str = "") -> tuple[int, ...]:
        """Numbers of ranks, of one variant."""
        if variant in self.ranks_of:
            return self.ranks_of[variant]
        if self.world_sizes is not None:
            return self.world_sizes
        return (1, 2) if self.can.data_parallel else (1,)

    # -- pytest --------------------------------------------------------------------------------------------------------

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Tests that name one of these run for each that there is: `several` are the numbers of ranks above 1,
        `scalar_task` the tasks with a scalar head, `low_dtype` what is not fp32."""
        try:
            values: dict[str, Sequence[Any]] = {
                "world_size": [(each, size) for each in self.variants for size in self.sizes(each)],
                "several": [(each, size) for each in self.variants for size in self.sizes(each) if size > 1],
                "task": list(self.can.tasks),
                "scalar_task": [task for task in self.can.tasks if task in ("value", "reward")],
                "low_dtype": [dtype for dtype in self.dtypes() if dtype != "fp32"],
            }
        except PluginError:  # the test that looks the name up says what is wrong with it
            values = dict.fromkeys(("world_size", "several", "task", "scalar_task", "low_dtype"), ())
        wanted = set(metafunc.fixturenames)
        if sized := wanted & {"world_size", "several"}:
            (name,) = sized
            metafunc.parametrize(("variant", name), values[name])
        elif "variant" in wanted:
            metafunc.parametrize("variant", list(self.variants))
        for name in ("task", "scalar_task", "low_dtype"):
            if name in wanted:
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
        """`models(task)`, each written once."""

        def made(which: Task | Literal["large"]) -> ModelSpec:
            written = self._once("models")
            if which not in written:
                folder = tmp_path_factory.mktemp(f"model-{which}")
                written[which] = self.large_model(folder) if which == "large" else self.model(which, folder)
            found: ModelSpec = written[which]
            return found

        return made

    @pytest.fixture
    def case(
        self,
        variant: str,
        strategy_config: Mapping[str, Any],
        models: Callable[[Task], ModelSpec],
        request: pytest.FixtureRequest,
    ) -> Case:
        """The strategy with a causal language model in fp32 and without an optimizer, to be changed by `with_`."""
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
        """`function(rank, case, *arguments)` on every rank; what it returned, by rank.

        Equal calls are made once: what a strategy answers does not depend on when it is asked.
        """
        key, answers = pickle.dumps((function, case, arguments)), self._once("answers")
        if key not in answers and case.world_size == 1 and not self.isolate:
            answers[key] = (function(0, case, *arguments),)
        if key not in answers:
            with_port = case.with_(master_port=free_port() if case.world_size > 1 else 0)
            host = _host(tuple(sorted(self.environment.items())), self.preload)
            answers[key] = host.run(
                function, with_port, *arguments, num_ranks=case.world_size, timeout_s=self.timeout_s
            )
        found: tuple[Any, ...] = answers[key]
        return found

    def scored(
        self, case: Case, sequences: Sequence[TrainSequence], want: Want, split: Split
    ) -> dict[str, dict[str, Floats]]:
        """Outputs of the whole batch, collected from the leaders: by name, then by id of the sequence."""
        from roll_testing.programs import score

        found: dict[str, dict[str, Floats]] = {}
        for answer in self.run(score, case, sequences, want, split):
            for name, rows in answer.items():
                found.setdefault(name, {}).update(rows)
        return found

    def trained(self, case: Case, training: TrainingSpec, steps: Sequence[Step]) -> Trained:
        """Optimizer steps over all ranks: rank 0's statistics, the metrics of all leaders together, the weights."""
        from roll_testing.programs import train

        self.need_training()
        answers: list[Trained] = list(self.run(train, case.with_(training=training), steps))
        leaders = [each for each in answers if each.data_rank.leader]
        together = [
            {name: sum(each.metrics[i].get(name, 0.0) for each in leaders) for name in _names(leaders, i)}
            for i in range(len(steps))
        ]
        source = next(each for each in answers if each.data_rank.index == 0 and each.data_rank.leader)
        return replace(source, stats=answers[0].stats, metrics=tuple(together))

    def reference(self, case: Case) -> Reference:
        """The reference for the case's model."""
        from roll_testing.reference import Reference

        return Reference(self.reference_model(case.model), case.model.task, self.optimizers)

    def batch(self, seed: int = 0) -> list[TrainSequence]:
        """Ragged sequences."""
        return make_batch(self.vocab_size, seed=seed)

    def need_training(self) -> None:
        """Skip for a twin that only scores."""
        self.need(not self.provider.forward_only, "training: it is forward-only")

    def _on_one(self, case: Case) -> Case:
        return case.with_(world_size=1, devices=case.devices[:1], strategy_config=case.config_alone)

    def _runs_alone(self, variant: str) -> bool:
        """`world_sizes` says what is tested, `ranks_of` what a variant needs."""
        return 1 in self.ranks_of.get(variant, (1,))

    def _config_alone(self) -> Mapping[str, Any]:
        for variant, config in self.variants.items():
            if self._runs_alone(variant):
                return config
        pytest.fail(f"{type(self).__name__}: none of the variants {', '.join(self.variants)} runs on one rank")

    def _platform_target(self, name: str) -> str:
        return next(each.target for each in registry().providers(PlatformProvider) if each.name == name)


def _names(answers: Sequence[Trained], step: int) -> list[str]:
    return sorted({name for each in answers for name in each.metrics[step]})


@cache
def _host(environment: tuple[tuple[str, str], ...], preload: tuple[str, ...]) -> RankHost:
    return RankHost(environment=dict(environment), preload=preload)
