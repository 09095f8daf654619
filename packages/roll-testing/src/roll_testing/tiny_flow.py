"""A small flow model with its library, programs and losses, for tests of module programs.

    v(x, σ, c) = W_out(block_1(block_0(W_in [x, σ] + W_cond c)))        block(h) = h + W_down tanh(W_up h)

Shapes: B rows, D values of a latent, C values of its conditioning.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from roll_core.spec.model import ModelSpec
from roll_core.spec.module_program import ModelLibrary, ModuleRow
from roll_core.spec.train import LossOutput

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from roll_core.spec.module_program import ModuleBatch, ProgramModule

SIZES: Mapping[str, Any] = {"size": 6, "cond_size": 3, "width": 16}
LIBRARY = "roll_testing.tiny_flow:TinyFlowLibrary"
FLOW = ModelSpec(task="flow", library=LIBRARY, random_init=SIZES, seed=3)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Block(nn.Module):
    """One residual block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    @override
    def forward(self, hidden: Tensor) -> Tensor:
        changed: Tensor = hidden + self.down(torch.tanh(self.up(hidden)))
        return changed


class TinyFlow(nn.Module):
    """The model."""

    scale: Tensor

    def __init__(self, size: int, cond_size: int, width: int) -> None:
        super().__init__()
        self.inside, self.cond = nn.Linear(size + 1, width), nn.Linear(cond_size, width, bias=False)
        self.blocks = nn.ModuleList([Block(width) for _ in range(2)])
        self.outside = nn.Linear(width, size)
        self.register_buffer("scale", torch.full((1,), 1.5))

    @override
    def forward(self, latents: Tensor, sigma: Tensor, cond: Tensor) -> Tensor:
        """Velocity `[B, D]` of latents `[B, D]` at times `[B]`."""
        hidden = self.inside(torch.cat([latents, sigma[:, None].to(latents.dtype)], dim=1)) + self.cond(cond)
        for block in self.blocks:
            hidden = block(hidden)
        velocity: Tensor = self.outside(hidden) * self.scale.to(hidden.dtype)
        return velocity


class TinyFlowLibrary(ModelLibrary):
    """Files: `config.json` with `SIZES`, and `flow.safetensors`."""

    @override
    def load(self, spec: ModelSpec) -> nn.Module:
        if spec.path:
            from safetensors.torch import load_file

            module = TinyFlow(**json.loads((_folder(spec) / "config.json").read_text(encoding="utf-8")))
            module.load_state_dict(load_file(_folder(spec) / "flow.safetensors"))
        else:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(spec.seed)
                module = TinyFlow(**(spec.random_init or {}))
        for parameter in module.parameters():
            parameter.data = parameter.data.to(DTYPES[spec.dtype])
        return module.eval()

    @override
    def blocks(self, module: nn.Module) -> Sequence[nn.Module]:
        blocks: Any = module.blocks
        return list(blocks)

    @override
    def write(self, module: nn.Module, spec: ModelSpec, state: Mapping[str, Tensor], path: Path) -> None:
        from safetensors.torch import save_file

        sizes = {
            "size": state["outside.weight"].shape[0],
            "cond_size": state["cond.weight"].shape[1],
            "width": state["cond.weight"].shape[0],
        }
        (path / "config.json").write_text(json.dumps(sizes), encoding="utf-8")
        save_file(
            {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}, path / "flow.safetensors"
        )


def _folder(spec: ModelSpec) -> Path:
    from pathlib import Path

    return Path(spec.path)


def flow_rows(number: int = 7, *, seed: int = 0, size: int = 6, cond_size: int = 3) -> list[ModuleRow]:
    """Rows with data `x`, conditioning `cond`, noise `noise` and a time `sigma`."""
    rng = np.random.default_rng(seed)
    return [
        ModuleRow(
            id=f"row-{seed}-{index}",
            arrays={
                "x": rng.normal(size=size).astype(np.float32),
                "cond": rng.normal(size=cond_size).astype(np.float32),
                "noise": rng.normal(size=size).astype(np.float32),
                "sigma": np.float32(rng.uniform()) + np.zeros((), np.float32),
            },
        )
        for index in range(number)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Euler:
    """Program: integrate from noise to data in `steps` Euler steps, σ from 1 to 0. Calls the module `steps` times."""

    steps: int = 4
    weights: str = ""
    """`base` or `average`: the parameters to use. Empty: the trained ones."""

    def __call__(self, module: ProgramModule, batch: ModuleBatch) -> dict[str, Tensor]:
        """Samples `[B, D]`."""
        if self.weights:
            with module.base() if self.weights == "base" else module.average():
                return self._sample(module, batch)
        return self._sample(module, batch)

    def _sample(self, module: ProgramModule, batch: ModuleBatch) -> dict[str, Tensor]:
        x = batch.tensors["noise"]
        for step in range(self.steps):
            sigma = torch.full(x.shape[:1], 1 - step / self.steps, device=x.device)
            x = x - module(x, sigma, cond=batch.tensors["cond"]).float() / self.steps
        return {"x": x}


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowMatching:
    """Loss: mean squared distance of v(x_σ, σ) to ε - x_0, plus that to the velocities of the model's other weights."""

    others: tuple[str, ...] = ()
    """`base`, `average`: weights whose velocities v' are computed after v, without gradients."""
    spoilt: str = ""
    """Id of a row whose loss is NaN."""

    def __call__(self, module: ProgramModule, batch: ModuleBatch) -> LossOutput:
        """Sum over rows, divided by the rows of the step."""
        tensors = batch.tensors
        sigma_B1 = tensors["sigma"][:, None]
        x_BD = (1 - sigma_B1) * tensors["x"] + sigma_B1 * tensors["noise"]
        found_BD = module(x_BD, tensors["sigma"], cond=tensors["cond"]).float()
        loss_B = (found_BD - (tensors["noise"] - tensors["x"])).square().mean(dim=1)
        for name in self.others:
            with module.base() if name == "base" else module.average():
                other_BD = module(x_BD, tensors["sigma"], cond=tensors["cond"]).float()
            loss_B = loss_B + (found_BD - other_BD).square().mean(dim=1)
        if self.spoilt in batch.ids:
            loss_B = loss_B * float("nan")
        loss = loss_B.sum() / batch.total_rows
        return LossOutput(loss=loss, metrics={"loss": loss, "rows": float(len(batch.ids))})
