"""A bigram model with all that a strategy may offer, done right; the wrong ones replace one method each."""

from __future__ import annotations

import json
import math
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from roll_core.algorithms.optimizers import adamw
from roll_core.errors import CheckpointError, DataError, ModelError, UnsupportedError
from roll_core.spec.train import ParameterState, PortableState, StepStats, TokenOutputs, TrainStrategy
from roll_modeling.optimizer import MOMENTS, clip_factor, moments, schedule
from roll_modeling.portable_files import opened_portable_state, write_portable_state
from roll_modeling.portable_state import check_same
from roll_modeling.task_model import finite_loss, plain_metrics
from roll_wrong.board import put

NAMES = {"causal_lm": ("table", "bias"), "value": ("worth", "bias")}


class Right(TrainStrategy):
    """Logits of the next token are a row of `table` and `bias`; the value of a token is a row of `worth`."""

    topk = gathered = True

    def build(self, model, mesh):
        if model.task not in NAMES:
            raise UnsupportedError(f"there is no bigram model of task {model.task}")
        self._mesh, self.spec, self.task = mesh, model, model.task
        try:
            stored = load_file(Path(model.path) / "weights.safetensors")
        except (OSError, SafetensorError) as error:
            raise ModelError(f"cannot load the model {model.path!r}: {error}") from error
        self.weights = {name: put(stored[name]) for name in NAMES[model.task]}
        for each in self.weights.values():
            each.requires_grad_(self.training is not None)
        self.steps = 0
        if mesh.world_size > 1:
            address = f"tcp://{mesh.master_addr}:{mesh.master_port}"
            wait = timedelta(seconds=mesh.timeout_s)
            dist.init_process_group(
                "gloo", init_method=address, rank=mesh.rank, world_size=mesh.world_size, timeout=wait
            )
        if self.training is not None:
            self.optimizer = self.made_optimizer()
            self.factor = schedule(self.training)
            for each in self.weights.values():
                self.kept(each)

    def made_optimizer(self):
        made = adamw(self.weights, self.training)
        for each in self.weights.values():
            made.state[each].update(zip(MOMENTS, map(put, moments(made, each)), strict=True))
        return made

    def kept(self, each):
        """What the optimizer keeps of a weight."""
        return dict(zip(("first", "second"), moments(self.optimizer, each), strict=True))

    # -- computing

    def logits(self, micro, want):
        """Of the token that stands at each place."""
        return (self.weights["table"][micro.tokens_T.roll(1)] + self.weights["bias"]) / want.temperature

    def inside(self, micro):
        return micro.positions_T > 0

    def outputs(self, micro, want):
        inside_T = self.inside(micro)
        found = {}
        if want.values:
            if self.task != "value":
                raise UnsupportedError("a language model has no values; ask for task value")
            found["values_T"] = self.values(micro) * inside_T
        if not want.head:
            return TokenOutputs(**found)
        if self.task != "causal_lm":
            raise UnsupportedError("a value model has no logprobs; ask for task causal_lm")
        all_TV = torch.log_softmax(self.logits(micro, want), dim=-1)
        if want.logprobs:
            found["logprobs_T"] = all_TV.gather(1, micro.tokens_T[:, None])[:, 0] * inside_T
        if want.entropy:
            found["entropy_T"] = self.entropy(all_TV) * inside_T
        if want.topk:
            found["topk_logprobs_TK"], found["topk_ids_TK"] = self.best(all_TV, want.topk, inside_T[:, None])
        if want.gathered:
            found["gathered_logprobs_TK"] = self.at(all_TV, micro) * inside_T[:, None]
        return TokenOutputs(**found)

    def values(self, micro):
        return self.weights["worth"][micro.tokens_T.roll(1)].sum(-1) + self.weights["bias"].sum()

    def entropy(self, all_TV):
        return -(all_TV.exp() * all_TV).sum(-1)

    def best(self, all_TV, number, inside_T1):
        if not self.topk:
            raise UnsupportedError("this strategy has no top-k logprobs")
        if number > all_TV.shape[1]:
            raise UnsupportedError(f"top-k of {number} tokens out of {all_TV.shape[1]}")
        found = all_TV.topk(number, dim=-1)
        return found.values * inside_T1, found.indices * inside_T1

    def at(self, all_TV, micro):
        ids_TK = micro.gather_ids_TK
        if not self.gathered or ids_TK.shape[1] > all_TV.shape[1]:
            raise UnsupportedError("this strategy has no logprobs of so many ids")
        if bool((ids_TK >= all_TV.shape[1]).any()):
            raise DataError("an id is not in the vocabulary")
        return all_TV.gather(1, ids_TK)

    def forward(self, micro, want):
        with torch.no_grad():
            return self.outputs(micro, want)

    # -- training

    def forward_backward(self, micros, loss):
        self.trains()
        return [self.backward(micro, loss, len(micros)) for micro in micros]

    def backward(self, micro, loss, number):
        outputs = self.outputs(micro, loss.want)
        found = finite_loss(loss, outputs, micro)
        self.scaled(found.loss, number).backward()
        return plain_metrics(found)

    def scaled(self, loss, number):
        return loss

    def optimizer_step(self):
        self.trains()
        self.reduce()
        gradients = [each.grad for each in self.weights.values() if each.grad is not None]
        norm = math.sqrt(sum(float(each.double().square().sum()) for each in gradients))
        rate = self.training.learning_rate * self.factor(self.schedule_position())
        if not math.isfinite(norm):
            return self.skip(norm, rate)
        for each in gradients:
            each.mul_(clip_factor(norm, self.training.max_grad_norm))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.steps += 1
        self.clear()
        return StepStats(grad_norm=norm, learning_rate=rate)

    def reduce(self):
        for each in self.weights.values():
            if each.grad is None:
                each.grad = torch.zeros_like(each)
            if self._mesh.world_size > 1:
                dist.all_reduce(each.grad)

    def schedule_position(self):
        return self.steps

    def skip(self, norm, rate):
        self.clear()
        return StepStats(grad_norm=norm, learning_rate=rate, skipped=True)

    def clear(self):
        for each in self.weights.values():
            each.grad = None

    def trains(self):
        if self.training is None:
            raise UnsupportedError("this role only scores, it was built without training settings")

    # -- state

    def export_weights(self):
        for name, each in self.weights.items():
            yield name, each.detach()

    def state(self):
        """What is saved, to be written in place."""
        found = {name: each.detach() for name, each in self.weights.items()}
        if self.training is not None:
            for name, each in self.weights.items():
                found |= {f"{name}.{kind}": one for kind, one in self.kept(each).items()}
        return found

    def save(self, path):
        save_file({name: each.contiguous() for name, each in self.state().items()}, path / "state.safetensors")
        (path / "steps.json").write_text(json.dumps(self.steps), encoding="utf-8")

    def load(self, path):
        try:
            stored = load_file(path / "state.safetensors")
            self.steps = json.loads((path / "steps.json").read_text(encoding="utf-8"))
        except (OSError, ValueError, SafetensorError) as error:
            raise CheckpointError(f"{path}: the state cannot be read: {error}") from error
        for name, each in self.restored().items():
            each.copy_(stored[name])
        for each in self.weights.values():
            if self.training is not None and "step" in self.optimizer.state[each]:
                self.optimizer.state[each]["step"].fill_(float(self.steps))
        self.clear()

    def restored(self):
        return self.state()

    def export_state(self):
        self.trains()
        shapes = {name: tuple(each.shape) for name, each in self.weights.items()}
        return PortableState(step_count=self.steps, shapes=shapes, read=self.held)

    def held(self, name):
        each = self.weights[name]
        first, second = moments(self.optimizer, each)
        return ParameterState(master=each.detach(), exp_avg=first, exp_avg_sq=second)

    def import_state(self, state):
        self.trains()
        self.refuse_other(state)
        self.steps = self.step_of(state)
        for name, each in self.weights.items():
            self.take(name, state.read(name))
            self.optimizer.state[each]["step"].fill_(float(self.steps))
        self.clear()

    def save_portable(self, path):
        write_portable_state(self.export_state(), self.spec, path, leads=self._mesh.rank == 0)

    def load_portable(self, path):
        with opened_portable_state(path) as state:
            self.import_state(state)

    def refuse_other(self, state):
        check_same(state, {name: tuple(each.shape) for name, each in self.weights.items()})

    def step_of(self, state):
        return state.step_count

    def take(self, name, found):
        held = self.held(name)
        held.master.copy_(found.master)
        held.exp_avg.copy_(found.exp_avg)
        held.exp_avg_sq.copy_(found.exp_avg_sq)

    # -- memory: weights and moments are on the board, and can be moved to the host

    def offload(self, parts):
        self.away = {"weights": {}, "optimizer": {}}
        if "weights" in parts:
            for name, each in self.weights.items():
                self.away["weights"][name] = self.to_host(each.data)
                each.data = torch.empty(0)
        if "optimizer" in parts:
            for name, each in self.weights.items():
                held = self.optimizer.state[each]
                self.away["optimizer"][name] = {moment: self.to_host(held.pop(moment)) for moment in MOMENTS}

    def to_host(self, tensor):
        return tensor.clone()

    def onload(self, parts):
        for name, each in self.away["weights"].items():
            self.weights[name].data = put(each)
        for name, each in self.away["optimizer"].items():
            self.optimizer.state[self.weights[name]].update({moment: put(one) for moment, one in each.items()})

    def memory(self):
        weights = sum(each.nbytes for each in self.weights.values())
        return {"weights": weights, "optimizer": 2 * weights}

    def close(self):
        if hasattr(self, "_mesh") and self._mesh.world_size > 1 and dist.is_initialized():
            dist.destroy_process_group()


class RightTogether(Right):
    """On several ranks."""
