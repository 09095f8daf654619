"""The kit against every strategy of roll-wrong, the right ones among them."""

from __future__ import annotations

import torch
from roll_wrong.optimizers import muon, sgd
from roll_wrong.plugin import OPTIMIZERS, WRONG
from safetensors.torch import load_file, save_file

from roll_core.spec.model import ModelSpec
from roll_core.spec.train import TrainingSpec
from roll_testing import ReferenceModel, TrainStrategyConformance
from roll_testing.losses import MAGNIFIED


class BigramReference(ReferenceModel):
    """Looked up token by token."""

    def __init__(self, path, task):
        self.module = torch.nn.Module()
        names = ("table", "bias") if task == "causal_lm" else ("worth", "bias")
        stored = load_file(f"{path}/weights.safetensors")
        for name in names:
            self.module.register_parameter(name, torch.nn.Parameter(stored[name]))

    def logits(self, tokens_L):
        return torch.stack([self.module.table[token] + self.module.bias for token in tokens_L.tolist()])

    def scores(self, tokens_L):
        return torch.stack([self.module.worth[token].sum() + self.module.bias.sum() for token in tokens_L.tolist()])


class Suite(TrainStrategyConformance):
    """What all of them need said."""

    isolate = False
    preload = (*TrainStrategyConformance.preload, "roll_wrong.wrong")

    def model(self, task, folder, size=61):
        drawn = torch.Generator().manual_seed(5)
        names = {"table": (size, size), "worth": (size, 3), "bias": (size,)}
        weights = {name: torch.randn(shape, generator=drawn) for name, shape in names.items()}
        save_file(weights, folder / "weights.safetensors")
        return ModelSpec(task=task, path=str(folder))

    def large_model(self, folder):
        return self.model("causal_lm", folder, size=1000)

    def reference_model(self, spec):
        return BigramReference(spec.path, spec.task)


class Sgd(Suite):
    """Of strategies that step with SGD: a step without weight decay is the gradient, magnified."""

    gradient_training = TrainingSpec(learning_rate=MAGNIFIED, lr_scheduler_type="constant")

    def optimizers(self, parameters, training):
        return [sgd(parameters.values(), training)]


class Muon(Suite):
    """Of strategies that step with Muon: no setting of it steps by the gradient."""

    gradient_training = None

    def optimizers(self, parameters, training):
        return muon(list(parameters.values()), training)


for name in OPTIMIZERS:
    title = f"Test_{name}"
    base = Muon if "muon" in name else Sgd
    globals()[title] = type(title, (base,), {"name": name, "__module__": __name__})

for name in ("right", "right_together", *WRONG):
    title = f"Test_{name}"
    globals()[title] = type(title, (Suite,), {"name": name, "__module__": __name__})
