"""Test group *module programs*: models of a library, which programs and losses call themselves.

The model is `tiny_flow.TinyFlow`. All tests need `capabilities.module_programs`, and skip variants with model
parallelism.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from roll_core.data.module_rows import module_batches
from roll_core.errors import NonFiniteError
from roll_core.plugins.targets import schema_of
from roll_core.spec.config import StrategyConfig
from roll_core.spec.model import LoraSpec
from roll_testing.bench import ModuleStep
from roll_testing.bounds import BOUNDS, SPLIT, check_near, check_rows, check_same, check_same_run
from roll_testing.losses import MAGNIFIED, TRAINING
from roll_testing.programs import expect, refuse_a_module_loss, resume, run_programs, save_between
from roll_testing.train_kit import TrainKit

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import nn

    from roll_core.spec.module_program import ModuleLoss, ModuleProgram, ModuleRow
    from roll_core.types import Floats
    from roll_testing.bench import Arrays, Case

AVERAGED = replace(TRAINING, ema_decay=0.6, ema_ramp=0.25)
"""Decays of steps 1, 2 and 3: 0.25, 0.5 and 0.6."""
ADAPTERS = LoraSpec(targets=("all-linear",), rank=2, alpha=4.0)
SPOILT_ROW = 2


class ModuleProgramTests(TrainKit):
    """Compares module programs of the strategy with plain torch, however rows are split."""

    def test_a_program_computes_what_the_module_computes(self, case: Case, world_size: int) -> None:
        """A program that calls the module four times must return plain torch's outputs, however rows are split."""
        from roll_testing.tiny_flow import Euler

        case, rows = self._flow(case), _rows()
        expected = _sampled(_module(), rows)
        for max_rows in (100, 3, 1):
            (samples,) = self._programs(case, [], rows, [Euler()], max_rows)[1]
            check_rows(f"samples with batches of {max_rows}", samples, expected, BOUNDS["fp32"].outputs)

    def test_the_gradient_of_a_program_equals_plain_torchs(self, case: Case) -> None:
        """The gradient of a loss that calls the module must be that of plain torch."""
        import torch

        from roll_testing.tiny_flow import FlowMatching

        case, module = self._flow(case), _module()
        with torch.enable_grad():
            _plain_loss(module, _rows(), FlowMatching()).backward()
        expected = {name: _array(parameter.grad) for name, parameter in module.named_parameters()}
        gradient = self._module_gradient(case, ModuleStep(rows=_rows(), loss=FlowMatching()))
        if self.gradient_training is None:
            norm = _norm([parameter.grad for parameter in module.parameters()])
            expected = {"norm": np.asarray(norm, np.float32)}
        check_near("gradient of a program", gradient, expected, BOUNDS["fp32"].gradient)

    @pytest.mark.parametrize("calls", [1, 2])
    def test_the_gradient_of_a_program_does_not_depend_on_batches(self, case: Case, calls: int) -> None:
        """Gradients must be sums over batches and calls: one row per batch gives that of the whole, to 1e-6."""
        together = self._module_gradient(self._flow(case), _step())
        split = self._module_gradient(self._flow(case), replace(_step(), max_rows=1, calls=calls))
        check_near(f"gradient of single rows over {calls} calls", split, together, SPLIT)

    @pytest.mark.parametrize("num_rows", [7, 1])
    def test_the_gradient_of_a_program_does_not_depend_on_ranks(self, case: Case, several: int, num_rows: int) -> None:
        """The gradient on several ranks must equal that on one, to 1e-6, also if ranks have no row.

        Metrics must add up to those of the whole batch.
        """
        case, step = self._flow(case), replace(_step(num_rows), max_rows=3)
        alone = self._module_gradient(self._on_one(case), _step(num_rows))
        check_near(f"gradient on {several} ranks", self._module_gradient(case, step), alone, SPLIT)
        (metrics,) = self.trained(case, TRAINING, [step]).metrics
        (expected,) = self.trained(self._on_one(case), TRAINING, [_step(num_rows)]).metrics
        assert metrics["rows"] == num_rows, f"metric rows adds up to {metrics['rows']}, expected {num_rows}"
        assert np.isclose(metrics["loss"], expected["loss"], rtol=1e-5), (
            f"metric loss adds up to {metrics['loss']:.6g}, expected {expected['loss']:.6g}"
        )

    def test_the_gradient_of_a_program_does_not_depend_on_checkpointing(self, case: Case) -> None:
        """Gradient checkpointing of the library's blocks must not change the gradient."""
        self.need(self.can.gradient_checkpointing, "gradient_checkpointing")
        case = self._flow(case)
        plain = self._module_gradient(case, _step())
        saving = case.with_(model=replace(case.model, gradient_checkpointing=True))
        check_near("gradient with checkpointing", self._module_gradient(saving, _step()), plain, SPLIT)

    def test_programs_compute_without_adapters(self, case: Case, world_size: int) -> None:
        """Within `base`, outputs must be those of the untrained model; outside, those of the exported weights.

        A loss that compares both must be that of plain torch in the second step, too, with gradient checkpointing.
        """
        from roll_testing.tiny_flow import Euler, FlowMatching

        self.need(self.can.lora, "lora")
        model = replace(self._flow(case).model, lora=ADAPTERS, gradient_checkpointing=self.can.gradient_checkpointing)
        case, rows = self._flow(case).with_(model=model, training=TRAINING), _rows()
        steps = [ModuleStep(rows=rows, loss=FlowMatching(others=("base",)), max_rows=3)] * 2
        held, (base, after) = self._programs(case, steps, rows, [Euler(weights="base"), Euler()])
        bound = BOUNDS["fp32"].outputs
        check_rows("samples without adapters", base, _sampled(_module(), rows), bound)
        check_rows("samples with adapters", after, _sampled(_module(held[-1]), rows), bound)
        loss = self.trained(case, TRAINING, steps).metrics[1]["loss"]
        expected = float(_plain_loss(_module(held[1]), rows, steps[1].loss, base=_module()).detach())
        assert np.isclose(loss, expected, rtol=1e-4), f"loss of step 2: {loss:.6g}, expected {expected:.6g}"

    def test_programs_compute_with_the_moving_average(self, case: Case, world_size: int) -> None:
        """Within `average`, outputs must be those of the average by hand, with decays 0.25, 0.5 and 0.6.

        The weights must then be the same bits as before. With `ema_per_batch`, the average must move once, with the
        decay of the last step.
        """
        from roll_testing.tiny_flow import Euler, FlowMatching

        self.need(self.can.ema, "ema")
        case, rows = self._flow(case).with_(training=AVERAGED), _rows()
        steps = [ModuleStep(rows=_rows(seed=i), loss=FlowMatching()) for i in range(3)]
        held, (before, averaged, after) = self._programs(
            case, steps, rows, [Euler(), Euler(weights="average"), Euler()]
        )
        check_rows("samples of the average", averaged, _sampled(_module(_average(held[:-1])), rows), 1e-5)
        check_rows("samples after those of the average", after, before, 0.0)
        check_same("weights after a program with the average", held[-1], held[-2])
        per_batch = case.with_(training=replace(AVERAGED, ema_per_batch=True))
        held, (averaged,) = self._programs(per_batch, steps, rows, [Euler(weights="average")])
        moved = {name: 0.6 * weight + 0.4 * held[-1][name] for name, weight in held[0].items()}
        check_rows("samples of the average of a batch", averaged, _sampled(_module(moved), rows), 1e-5)

    def test_a_loss_may_use_the_moving_average(self, case: Case, world_size: int) -> None:
        """A loss that enters `average` after it called the module must have plain torch's value and gradient norm."""
        from roll_testing.tiny_flow import FlowMatching

        self.need(self.can.ema, "ema")
        case, rows = self._flow(case), _rows()
        loss = FlowMatching(others=("average",))
        steps = [ModuleStep(rows=rows, loss=loss, max_rows=3)] * 2
        held, _ = self._programs(case.with_(training=AVERAGED), steps[:1], rows, [])
        module, average = _module(held[1]), _module(_average(held[:2]))
        expected = _plain_loss(module, rows, loss, average=average)
        expected.backward()
        norm = _norm([parameter.grad for parameter in module.parameters()])
        trained = self.trained(case, AVERAGED, steps)
        assert np.isclose(trained.metrics[1]["loss"], float(expected.detach()), rtol=1e-4), (
            f"loss of step 2: {trained.metrics[1]['loss']:.6g}, expected {float(expected.detach()):.6g}"
        )
        assert np.isclose(trained.stats[1].grad_norm, norm, rtol=1e-4), (
            f"gradient norm of step 2: {trained.stats[1].grad_norm:.6g}, expected {norm:.6g}"
        )

    def test_training_by_programs_resumes(self, case: Case, world_size: int, tmp_path: Path) -> None:
        """A resumed run must equal an uninterrupted one bit for bit, its moving average included."""
        from roll_testing.tiny_flow import FlowMatching

        loss = FlowMatching(others=("average",) if self.can.ema else ())
        case = self._flow(case).with_(training=AVERAGED if self.can.ema else TRAINING)
        steps = [ModuleStep(rows=_rows(seed=i), loss=loss, max_rows=3) for i in range(4)]
        straight = self.run(save_between, case, steps, 2, str(tmp_path))
        resumed = self.run(resume, case, [replace(_step(), rows=_rows(seed=9))], steps[2:], str(tmp_path))
        for rank, (trained, expected) in enumerate(zip(resumed, straight, strict=True)):
            check_same_run(f"rank {rank}, resumed after 2 steps,", trained, expected)
            assert trained.metrics == expected.metrics, f"rank {rank}: metrics differ after a resume"

    def test_a_module_loss_that_is_not_finite_is_named(self, case: Case, world_size: int) -> None:
        """A NaN loss of one row must raise `NonFiniteError` with the row on every rank; weights must not change."""
        from roll_testing.tiny_flow import FlowMatching

        self.need_training()
        rows = _rows()
        step = ModuleStep(rows=rows, loss=FlowMatching(spoilt=rows[SPOILT_ROW].id), max_rows=1)
        for error, before, after in self.run(refuse_a_module_loss, self._flow(case).with_(training=TRAINING), step):
            expect(error, NonFiniteError, "a module loss that is NaN", rows[SPOILT_ROW].id)
            check_same("weights after the loss", after, before)

    @pytest.mark.parametrize("lora", [False, True], ids=["whole", "adapters"])
    def test_a_model_of_a_library_is_exported(self, case: Case, world_size: int, lora: bool, tmp_path: Path) -> None:
        """The library must load the exported model: the same bits as `export_weights`, merged with adapters."""
        from roll_testing.tiny_flow import FlowMatching

        self.need(not lora or self.can.lora, "lora")
        case = self._flow(case).with_(training=TRAINING)
        case = case.with_(model=replace(case.model, lora=ADAPTERS if lora else None))
        steps = [ModuleStep(rows=_rows(seed=i), loss=FlowMatching()) for i in range(2)]
        held, _ = self._programs(case, steps, _rows(), [], folder=str(tmp_path))
        loaded = _module(path=str(tmp_path))
        check_same("weights of the exported model", _arrays(loaded), held[-1])
        check_rows("samples", _sampled(loaded, _rows()), _sampled(_module(held[-1]), _rows()), 0.0)

    # -- running -------------------------------------------------------------------------------------------------------

    def _flow(self, case: Case) -> Case:
        from roll_testing.tiny_flow import FLOW

        self.need(self.can.module_programs, "module_programs")
        self.need_training()
        schema = schema_of(case.provider, StrategyConfig, owner=self.name)
        sizes = schema.model_validate(dict(case.strategy_config)).parallel_sizes()
        if any(size > 1 for size in sizes.values()):
            pytest.skip(f"model parallelism {dict(sizes)}: a strategy need not have a plan for a library's module")
        return case.with_(model=FLOW)

    def _programs(
        self,
        case: Case,
        steps: Sequence[ModuleStep],
        rows: Sequence[ModuleRow],
        programs: Sequence[ModuleProgram],
        max_rows: int = 3,
        folder: str = "",
    ) -> tuple[list[Arrays], list[dict[str, Floats]]]:
        """Return the weights of rank 0 between the steps, and the samples of each program from all leaders."""
        answers = self.run(run_programs, case, steps, rows, programs, max_rows, folder)
        samples: list[dict[str, Floats]] = [{} for _ in programs]
        for _, outputs in answers:
            for index, output in enumerate(outputs):
                samples[index] |= output.get("x", {})
        return answers[0][0], samples

    def _module_gradient(self, case: Case, step: ModuleStep) -> Arrays:
        """Return the gradient by parameter name, read off one step; its norm without `gradient_training`."""
        if self.gradient_training is None:
            done = self.trained(case, replace(TRAINING, weight_decay=0.0), [step])
            return {"norm": np.asarray(done.stats[0].grad_norm, np.float32)}
        done = self.trained(case, self.gradient_training, [step])
        return {name: (before - done.after[name]) / MAGNIFIED for name, before in done.before.items()}


# -- plain torch -------------------------------------------------------------------------------------------------------


def _rows(number: int = 7, *, seed: int = 0) -> list[ModuleRow]:
    from roll_testing.tiny_flow import flow_rows

    return flow_rows(number, seed=seed)


def _step(num_rows: int = 7) -> ModuleStep:
    from roll_testing.tiny_flow import FlowMatching

    return ModuleStep(rows=_rows(num_rows), loss=FlowMatching())


def _module(weights: Mapping[str, Floats] | None = None, path: str = "") -> nn.Module:
    """The model as its library loads it, or with other weights."""
    import torch

    from roll_testing.tiny_flow import FLOW, TinyFlowLibrary

    spec = replace(FLOW, path=path, random_init=None) if path else FLOW
    module = TinyFlowLibrary().load(spec)
    if weights is not None:
        module.load_state_dict({name: torch.from_numpy(weight) for name, weight in weights.items()}, strict=False)
    return module


@dataclass(frozen=True, slots=True, kw_only=True)
class _PlainModule:
    """A `ProgramModule` of several modules: the trained one, that without adapters, and that with the average."""

    others: Mapping[str, nn.Module]
    active: list[nn.Module]

    @property
    def device(self) -> Any:
        return "cpu"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.active[-1](*args, **kwargs)

    def base(self) -> Any:
        return self._within("base")

    def average(self) -> Any:
        return self._within("average")

    @contextmanager
    def _within(self, name: str) -> Iterator[None]:
        import torch

        self.active.append(self.others[name])
        with torch.no_grad():
            yield
        self.active.pop()


def _plain(module: nn.Module, **others: nn.Module) -> _PlainModule:
    return _PlainModule(others=others, active=[module])


def _plain_loss(module: nn.Module, rows: Sequence[ModuleRow], loss: ModuleLoss, **others: nn.Module) -> Any:
    ((_, batch),) = module_batches(rows, max_rows=len(rows), total_rows=len(rows))
    return loss(_plain(module, **others), batch).loss


def _sampled(module: nn.Module, rows: Sequence[ModuleRow]) -> dict[str, Floats]:
    import torch

    from roll_testing.tiny_flow import Euler

    ((_, batch),) = module_batches(rows, max_rows=len(rows))
    with torch.no_grad():
        samples = Euler()(_plain(module), batch)["x"]
    return dict(zip(batch.ids, _array(samples), strict=True))


def _average(held: Sequence[Arrays]) -> Arrays:
    """Moving average of the weights before the first and after each step: d_t = min(0.6, 0.25 t)."""
    average = {name: weight.astype(np.float64) for name, weight in held[0].items()}
    for step, after in enumerate(held[1:], 1):
        decay = min(0.6, 0.25 * step)
        average = {name: decay * weight + (1 - decay) * after[name] for name, weight in average.items()}
    return {name: weight.astype(np.float32) for name, weight in average.items()}


def _arrays(module: nn.Module) -> Arrays:
    return {name: _array(parameter) for name, parameter in module.named_parameters()}


def _norm(gradients: Sequence[Any]) -> float:
    return float(np.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients)))


def _array(tensor: Any) -> Floats:
    array: Floats = tensor.detach().float().numpy().copy()
    return array
