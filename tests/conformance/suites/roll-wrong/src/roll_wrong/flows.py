"""Strategies for module programs: `hf_train`, which is right, and wrong ones that replace one method of it each."""

from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch

from roll_core.errors import NonFiniteError
from roll_modeling.module_programs import StrategyModule
from roll_strategy_hf.train import HFTrainStrategy


class RightFlow(HFTrainStrategy):
    """Right."""


class CallsOnce(RightFlow):
    """Runs the module once per batch, and returns the same for later calls of a program."""

    def run_module(self, batches, program):
        for batch in batches:
            first = []

            def forward(*args, first=first, **kwargs):
                first.append(self.model(*args, **kwargs))
                return first[0]

            with torch.no_grad():
                module = StrategyModule(forward, device="cpu", dtype=torch.float32)
                module.base, module.average = self._module().base, self._module().average
                yield program(module, batch)


def scaled(factor_of):
    """Losses multiplied by a factor of the batches."""

    def forward_backward_module(self, batches, loss):
        factor = factor_of(self, batches)

        def multiplied(module, batch):
            found = loss(module, batch)
            return replace(found, loss=found.loss * factor)

        return HFTrainStrategy.forward_backward_module(self, batches, multiplied)

    return forward_backward_module


class HalvesLosses(RightFlow):
    """Gradients of half of the loss."""

    forward_backward_module = scaled(lambda self, batches: 0.5)


class MeanOfBatches(RightFlow):
    """A mean over batches instead of their sum."""

    forward_backward_module = scaled(lambda self, batches: 1 / max(len(batches), 1))


class MeanOfReplicas(RightFlow):
    """A mean over ranks instead of their sum."""

    forward_backward_module = scaled(lambda self, batches: 1 / self.replicas.size)


class CutsBlocks(RightFlow):
    """Saves no activations, and recomputes none."""

    def build(self, model, mesh):
        super().build(replace(model, gradient_checkpointing=False), mesh)
        if model.gradient_checkpointing:
            for block in self.library.blocks(self.model):
                block.register_forward_hook(lambda block, args, output: args[0] + (output - args[0]).detach())


class BaseWithAdapters(RightFlow):
    """Leaves the adapters on."""

    def _module(self):
        module = super()._module()
        if self.adapters is not None:
            module._contexts["base"] = nullcontext
        return module


class AverageWithoutRamp(RightFlow):
    """The full decay from the first step."""

    def build(self, model, mesh):
        self.training = self.training and replace(self.training, ema_ramp=None)
        super().build(model, mesh)


class AverageOfEachStep(RightFlow):
    """Also moves the average of a batch after each optimizer step."""

    def build(self, model, mesh):
        self.training = self.training and replace(self.training, ema_per_batch=False)
        super().build(model, mesh)


class AverageStays(RightFlow):
    """Leaves the average in the weights after a program; losses restore them."""

    def run_module(self, batches, program):
        yield from super().run_module(batches, program)
        with torch.no_grad():
            for name, average in (self.optimizer.averages if self.optimizer else {}).items():
                self.optimizer.masters[name].lerp_(average, 0.5)


class AverageSeenByAutograd(RightFlow):
    """Changes weights in a way that autograd notices."""

    def _module(self):
        module = super()._module()
        if module._contexts["average"] is not None:
            module._contexts["average"] = self.swapped
        return module

    @contextmanager
    def swapped(self):
        kept = {name: each.detach().clone() for name, each in self.optimizer.parameters.items()}
        for name, each in self.optimizer.parameters.items():
            each.copy_(self.optimizer.averages[name])
        yield
        for name, each in self.optimizer.parameters.items():
            each.copy_(kept[name])


class AverageLost(RightFlow):
    """A resumed run begins another average."""

    def load(self, path):
        super().load(path)
        for name, average in self.optimizer.averages.items():
            average.copy_(self.optimizer.masters[name].detach())


class NamelessFlow(RightFlow):
    """A loss of NaN is found, but not its row."""

    def forward_backward_module(self, batches, loss):
        try:
            return super().forward_backward_module(batches, loss)
        except NonFiniteError:
            raise NonFiniteError("a loss is not finite") from None


class ExportsBase(RightFlow):
    """Leaves the adapters out of the exported model."""

    def export_model(self, path):
        state = {name: each for name, each in self.model.state_dict().items() if ".lora_" not in name}
        plain = {name.replace(".base_layer.", "."): each for name, each in state.items()}
        self.library.write(self.model, self.spec, plain, path)
