"""A flow model of a few parameters behind the interface that programs see, without a strategy."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from roll_core.errors import UnsupportedError
from roll_core.spec.module_program import ModuleBatch
from roll_pipeline_diffusion.algorithm_config import BoundFunction
from roll_pipeline_diffusion.programs import FlowSetup
from roll_pipeline_diffusion.schedules import SigmaSchedule

SHAPE = (2, 2, 2)


class TinyFlowNet(nn.Module):
    """Two layers on latents, sigma and a conditioning of 3 numbers."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.up, self.down = nn.Linear(8 + 1 + 3, 16), nn.Linear(16, 8)

    @override
    def forward(self, latents: Tensor, sigma: Tensor, prompt: Tensor) -> Tensor:
        hidden = torch.cat([latents.flatten(1), sigma[:, None], prompt], dim=1)
        velocity: Tensor = self.down(torch.tanh(self.up(hidden)))
        return velocity.reshape(latents.shape)


class ConstantNet(nn.Module):
    """Velocity that is the parameter itself, so that gradients by the velocity can be worked by hand."""

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.v = nn.Parameter(torch.full(SHAPE, value))

    @override
    def forward(self, latents: Tensor, sigma: Tensor, prompt: Tensor) -> Tensor:
        return self.v.expand_as(latents)


class ModuleDouble:
    """`ProgramModule` around torch modules."""

    def __init__(self, net: Any, *, base: Any = None, average: Any = None) -> None:
        self.net, self.others = net, {"base": base, "average": average}
        self.active = net
        self.calls: list[tuple[float, bool]] = []
        self.device = torch.device("cpu")

    def __call__(self, latents: Tensor, sigma: Tensor, **kwargs: Tensor) -> Any:
        self.calls.append((round(float(sigma[0]), 6), torch.is_grad_enabled()))
        return self.active(latents, sigma, **kwargs)

    @contextmanager
    def _within(self, name: str) -> Iterator[None]:
        if self.others[name] is None:
            raise UnsupportedError(name)
        self.active = self.others[name]
        try:
            with torch.no_grad():
                yield
        finally:
            self.active = self.net

    def base(self) -> AbstractContextManager[None]:
        return self._within("base")

    def average(self) -> AbstractContextManager[None]:
        return self._within("average")


def flow_setup(*, num_steps: int = 4, sampler: str = "sde", noise_level: float = 0.7, **others: Any) -> FlowSetup:
    options = {} if sampler == "ode" else {"noise_level": noise_level}
    return FlowSetup(
        schedule=SigmaSchedule(num_steps=num_steps),
        latent_shape=SHAPE,
        sampler=BoundFunction(target=f"roll_pipeline_diffusion.samplers:{sampler}", options=options),
        **others,
    )


def flow_batch(
    tensors: Mapping[str, Tensor], rows: Sequence[int] | None = None, total_rows: int | None = None
) -> ModuleBatch:
    """Rows of tensors by their indices; all of them by default."""
    number = len(next(iter(tensors.values())))
    rows = list(range(number)) if rows is None else rows
    return ModuleBatch(
        ids=tuple(f"row{at}" for at in rows),
        tensors={name: each[list(rows)] for name, each in tensors.items()},
        total_rows=number if total_rows is None else total_rows,
    )


def flow_tensors(number: int = 5, seed: int = 0) -> dict[str, Tensor]:
    """Rows with everything that an objective may read."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(number, *shape, generator=generator)

    return {
        "seed": torch.arange(number) * 7919 + seed,
        "cond.prompt": normal(3),
        "uncond.prompt": torch.zeros(number, 3),
        "latents": normal(*SHAPE),
        "chosen_latents": normal(*SHAPE),
        "rejected_latents": normal(*SHAPE),
        "advantages": normal(),
    }
