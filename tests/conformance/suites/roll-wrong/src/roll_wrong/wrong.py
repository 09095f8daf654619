"""One mistake each. The first line of each class says which."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import torch

from roll_core.spec.train import StepStats
from roll_modeling.optimizer import clip_factor
from roll_wrong.board import put
from roll_wrong.right import Right, RightTogether


class MeanOfMicrobatches(Right):
    """Divides by the number of microbatches, as other trainers do."""

    def scaled(self, loss, number):
        return loss / number


class MeanOfRanks(RightTogether):
    """Divides by the number of ranks, as DDP does."""

    def reduce(self):
        super().reduce()
        for each in self.weights.values():
            each.grad /= self._mesh.world_size


class SkipsAlone(RightTogether):
    """Leaves out what is NaN on its own rank, and does not tell the others."""

    def optimizer_step(self):
        if all(each.grad is None or each.grad.isfinite().all() for each in self.weights.values()):
            return super().optimizer_step()
        self.clear()
        self.reduce()
        return self.skip(math.nan, self.training.learning_rate)


class ForgottenMask(Right):
    """Lets every token into the loss, the prompts' too."""

    def backward(self, micro, loss, number):
        return super().backward(replace(micro, loss_mask_T=micro.positions_T > 0), loss, number)


class OffByOne(Right):
    """Scores token t by what is predicted after it."""

    def forward(self, micro, want):
        found = super().forward(micro, want)
        return found if found.logprobs_T is None else replace(found, logprobs_T=found.logprobs_T.roll(1))


class LeakingNeighbours(Right):
    """Predicts a sequence's first token from the last one of its neighbour."""

    def inside(self, micro):
        return torch.ones_like(micro.positions_T)


class TemperatureIgnored(Right):
    """Computes logprobs and entropy at temperature 1."""

    def logits(self, micro, want):
        return super().logits(micro, replace(want, temperature=1.0))


class EntropyInBits(Right):
    """Reports the entropy in bits."""

    def forward(self, micro, want):
        found = super().forward(micro, want)
        return found if found.entropy_T is None else replace(found, entropy_T=found.entropy_T / math.log(2))


class ValuesShifted(Right):
    """Returns the value after a token for the one before it."""

    def forward(self, micro, want):
        found = super().forward(micro, want)
        return found if found.values_T is None else replace(found, values_T=found.values_T.roll(-1))


class TopkBackwards(Right):
    """Returns the worst of the best first."""

    def best(self, all_TV, number, inside_T1):
        return tuple(each.flip(-1) for each in super().best(all_TV, number, inside_T1))


class GivenIdsDetached(Right):
    """Logprobs of given ids train nothing."""

    def at(self, all_TV, micro):
        return super().at(all_TV.detach(), micro)


class AnyNumberOfIds(Right):
    """Gives fewer of the most likely tokens than requested, and of ids outside the vocabulary the last one's."""

    def best(self, all_TV, number, inside_T1):
        return super().best(all_TV, min(number, all_TV.shape[1]), inside_T1)

    def at(self, all_TV, micro):
        return all_TV.gather(1, micro.gather_ids_TK.clamp(max=all_TV.shape[1] - 1))


class ClipsMicrobatches(Right):
    """Clips what each microbatch adds instead of their sum."""

    def backward(self, micro, loss, number):
        before = {name: each.grad for name, each in self.weights.items()}
        self.clear()
        metrics = super().backward(micro, loss, number)
        gradients = {name: each.grad for name, each in self.weights.items() if each.grad is not None}
        norm = math.sqrt(sum(float(each.square().sum()) for each in gradients.values()))
        factor = clip_factor(norm, self.training.max_grad_norm)
        for name, each in self.weights.items():
            added = [one for one in (before[name], each.grad) if one is not None]
            each.grad = None if not added else added[0] if each.grad is None else sum(added[:-1], added[-1] * factor)
        return metrics


class ScheduleAhead(Right):
    """Uses the next step's learning rate."""

    def schedule_position(self):
        return self.steps + 1


class GradientsKept(Right):
    """Does not clear the gradients after a step."""

    def clear(self):
        pass


class DecaysBiases(Right):
    """Decays every parameter."""

    def build(self, model, mesh):
        super().build(model, mesh)
        if self.training is not None:
            for group in self.optimizer.param_groups:
                group["weight_decay"] = self.training.weight_decay


class StaleExport(Right):
    """Exports a copy that a load does not renew."""

    def export_weights(self):
        if getattr(self, "copied_at", None) != self.steps_taken:
            self.copies = {name: each.detach().clone() for name, each in self.weights.items()}
            self.copied_at = self.steps_taken
        yield from self.copies.items()

    steps_taken = 0

    def optimizer_step(self):
        self.steps_taken += 1
        return super().optimizer_step()


class OptimizerLost(Right):
    """Keeps the moments that it had when a state is loaded."""

    def restored(self):
        return {name: each for name, each in super().restored().items() if "." not in name}


class StateLostAway(Right):
    """Comes back from the host with new moments."""

    def onload(self, parts):
        super().onload(parts)
        if "optimizer" in parts:
            for each in self.weights.values():
                self.optimizer.state[each].update(
                    exp_avg=put(torch.zeros_like(each)), exp_avg_sq=put(torch.zeros_like(each))
                )


class WeightsTakenAlong(Right):
    """Moves the weights away with the optimizer, as if they were its masters."""

    def offload(self, parts):
        super().offload((*parts, "weights") if "optimizer" in parts else parts)


class MemoryKept(Right):
    """Still refers to what it has moved away."""

    def to_host(self, tensor):
        self.remembered = [*getattr(self, "remembered", ()), tensor]
        return super().to_host(tensor)


class SkipNotReported(Right):
    """Leaves a step out without a word."""

    def skip(self, norm, rate):
        return replace(super().skip(norm, rate), skipped=False)


class StepsOnNan(Right):
    """Takes every step."""

    def skip(self, norm, rate):
        self.optimizer.step()
        self.clear()
        return StepStats(grad_norm=norm, learning_rate=rate, skipped=True)


class ClosesOnce(Right):
    """Cannot be closed again."""

    closed = False

    def close(self):
        super().close()
        if self.closed and hasattr(self, "weights"):
            raise RuntimeError("already closed")
        self.closed = True


class ForwardClears(Right):
    """Clears gradients whenever it scores."""

    def forward(self, micro, want):
        self.clear()
        return super().forward(micro, want)


class ScorerTrains(Right):
    """Takes gradients for a role that only scores."""

    def trains(self):
        pass


class SilentWithoutTopk(Right):
    """Returns something else where top-k was wanted and is not declared."""

    gathered = False

    def best(self, all_TV, number, inside_T1):
        return all_TV, all_TV


class DeclaresTooMuch(Right):
    """Declares a kind of parallelism that nothing shows."""


class Heavy(Right):
    """Has a schema whose module imports torch."""


class SavesRounded(Right):
    """Rounds its weights when it saves."""

    def save(self, path):
        with torch.no_grad():
            for each in self.weights.values():
                each.copy_(each.bfloat16().float())
        super().save(path)


class SavesLate(Right):
    """Leaves to be written what is the state by then."""

    def save(self, path):
        return partial(super().save, path) if self.weights else None


class TakesEveryTask(Right):
    """Builds a language model whatever the task."""

    def build(self, model, mesh):
        if model.task == "reward":
            model = replace(model, task="causal_lm")
        super().build(model, mesh)


class DamageIgnored(Right):
    """Starts anew where a state cannot be read."""

    def load(self, path):
        try:
            super().load(path)
        except RuntimeError:
            self.steps = 0


class NamelessNan(Right):
    """Turns a loss that is NaN into nothing."""

    def backward(self, micro, loss, number):
        return super().backward(micro, _Silent(loss), number)


class _Silent:
    """A loss without its NaN."""

    def __init__(self, loss):
        self.loss, self.want = loss, loss.want

    def __call__(self, outputs, micro):
        found = self.loss(outputs, micro)
        return replace(found, loss=found.loss.nan_to_num())


class PortableMomentsLost(Right):
    """Takes over the masters alone."""

    def take(self, name, found):
        self.held(name).master.copy_(found.master)


class PortableStepForgotten(Right):
    """Begins the schedule anew."""

    def step_of(self, state):
        return 0


class PortableInOwnUnits(Right):
    """Exchanges the root of the second moment for the moment, both ways."""

    def export_state(self):
        state = super().export_state()

        def read(name):
            found = state.read(name)
            return replace(found, exp_avg_sq=found.exp_avg_sq.sqrt())

        return replace(state, read=read)

    def take(self, name, found):
        super().take(name, replace(found, exp_avg_sq=found.exp_avg_sq.square()))


class PortableRounded(Right):
    """Exports masters in the precision of a model in bfloat16."""

    def export_state(self):
        state = super().export_state()

        def read(name):
            found = state.read(name)
            return replace(found, master=found.master.bfloat16().float())

        return replace(state, read=read)


class PortableTakenAway(Right):
    """Has no moments any more once they were exported."""

    def export_state(self):
        state = super().export_state()

        def read(name):
            held = state.read(name)
            found = replace(held, exp_avg=held.exp_avg.clone())
            held.exp_avg.zero_()
            return found

        return replace(state, read=read)


class PortableOfAnyModel(Right):
    """Takes what it finds of a state."""

    def import_state(self, state):
        here = {name for name in self.weights if name in state.shapes}
        self.weights = {name: each for name, each in self.weights.items() if name in here}
        super().import_state(state)

    def refuse_other(self, state):
        pass
