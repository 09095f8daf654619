"""Strategies that step with another optimizer than AdamW: right ones, and one mistake each."""

from dataclasses import replace

import torch

from roll_core.errors import UnsupportedError
from roll_wrong.board import put
from roll_wrong.right import Right


def sgd(weights, training):
    """SGD with momentum."""
    return torch.optim.SGD(weights, lr=training.learning_rate, momentum=0.9, weight_decay=training.weight_decay)


def muon(weights, training):
    """Muon on matrices, SGD on vectors."""
    matrices, vectors = [each for each in weights if each.ndim == 2], [each for each in weights if each.ndim != 2]
    return [
        torch.optim.Muon(matrices, lr=training.learning_rate, weight_decay=training.weight_decay),
        sgd(vectors, training),
    ]


class RightSgd(Right):
    """Has a momentum, and no second moment."""

    def made_optimizer(self):
        return sgd(self.weights.values(), self.training)

    def kept(self, each):
        state = self.optimizer.state[each]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = put(torch.zeros_like(each))
        return {"momentum": state["momentum_buffer"]}

    def export_state(self):
        raise UnsupportedError("the state of this optimizer is not what others have")

    def import_state(self, state):
        raise UnsupportedError("the state of this optimizer is not what others have")


class _Together:
    """Several optimizers as one."""

    def __init__(self, each):
        self.each = each
        self.param_groups = [group for one in each for group in one.param_groups]

    @property
    def state(self):
        return {each: one.state[each] for one in self.each for group in one.param_groups for each in group["params"]}

    def step(self):
        for one in self.each:
            one.step()


class RightMuon(RightSgd):
    """Steps along orthogonal matrices, whose size says nothing of the gradient's."""

    def made_optimizer(self):
        return _Together(muon(list(self.weights.values()), self.training))


class SgdMeanOfMicrobatches(RightSgd):
    """Divides by the number of microbatches."""

    def scaled(self, loss, number):
        return loss / number


class MuonMeanOfMicrobatches(RightMuon):
    """Divides by the number of microbatches: only the norm shows it."""

    def scaled(self, loss, number):
        return loss / number


class MuonForgottenMask(RightMuon):
    """Lets every token into the loss, the prompts' too."""

    def backward(self, micro, loss, number):
        return super().backward(replace(micro, loss_mask_T=micro.positions_T > 0), loss, number)


class SgdMomentumLost(RightSgd):
    """Keeps the momentum that it had when a state is loaded."""

    def restored(self):
        return {name: each for name, each in super().restored().items() if "." not in name}


class SgdInsteadOfMuon(RightSgd):
    """Steps with another optimizer than its suite says."""
