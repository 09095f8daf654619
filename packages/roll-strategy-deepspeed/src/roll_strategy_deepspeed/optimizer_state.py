"""Access to the state of DeepSpeed's optimizers: master weights, Adam moments and moving averages as full tensors, and
the loss scale.

| optimizer | master weights | moments |
|---|---|---|
| stage 0, float32 | the parameters | torch's optimizer state of the parameters |
| stage 0, 16 bit | `fp32_groups`, one tensor per parameter | torch's optimizer state of those tensors |
| stages 1 to 3 | flat partitions, accessed by DeepSpeed's own functions | torch's optimizer state of the partitions |

A moving average is one more entry of torch's optimizer state, beside the moments, and is read and written like them.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch

from roll_core.errors import UnsupportedError
from roll_core.spec.train import ParameterState
from roll_modeling.optimizer import MOMENTS, exchange, moments, move_averages
from roll_strategy_deepspeed.workarounds import make_moments_known, undo_first_step

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor, nn

    from roll_core.spec.train import TrainingSpec

AVERAGE = "average"
"""Name of a moving average in torch's optimizer state."""


class OptimizerState:
    """Master weights, moments and moving averages of one engine.

    Reading and writing is collective, in the order of `parameters`.
    """

    def __init__(
        self, engine: Any, parameters: Mapping[str, nn.Parameter], training: TrainingSpec, *, stage: int
    ) -> None:
        """`parameters` are the trained ones, by name. Allocates the moments if no step was taken yet."""
        self.engine, self.parameters, self.training, self.stage = engine, dict(parameters), training, stage
        self.kinds = ("master", *MOMENTS) if training.ema_decay is None else ("master", *MOMENTS, AVERAGE)
        """Tensors of a parameter: master weight, moments, and the moving average with `ema_decay`."""
        self.torch_optimizer: torch.optim.AdamW = engine.basic_optimizer
        for stepped in self._stepped():
            moments(self.torch_optimizer, stepped)
        if not stage:
            undo_first_step(
                self.torch_optimizer,
                {id(parameter): parameter.data for parameter in self.parameters.values()},
                self.masters_apart,
            )
        for stepped in self._stepped():
            if AVERAGE in self.kinds:
                self.torch_optimizer.state[stepped][AVERAGE] = stepped.detach().clone()
        if stage in (1, 2):
            make_moments_known(engine)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Whole shapes of the trained parameters, by name."""
        return {
            name: tuple(getattr(parameter, "ds_shape", parameter.shape)) for name, parameter in self.parameters.items()
        }

    @property
    def masters_apart(self) -> dict[int, Tensor]:
        """Stage 0: the master weight of each parameter, by the parameter's `id`; in float32, the parameter itself."""
        lists = getattr(self.engine.optimizer, "fp16_groups", None)
        if lists is None:
            return {id(parameter): parameter for parameter in self.parameters.values()}
        pairs = zip(lists, self.engine.optimizer.fp32_groups, strict=True)
        return {id(low): high for lows, highs in pairs for low, high in zip(lows, highs, strict=True)}

    def read(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of a parameter by kind, in the order of `kinds`, as full tensors, on every rank.

        A tensor may become invalid when the next one is read.
        """
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        parameter = self.parameters[name]
        if not self.stage:
            master = self.masters_apart[id(parameter)]
            yield "master", master
            for kind in self.kinds[1:]:
                yield kind, self.torch_optimizer.state[master][kind]
            return
        yield "master", safe_get_full_fp32_param(parameter)
        for kind in self.kinds[1:]:
            yield kind, safe_get_full_optimizer_state(parameter, kind)

    def read_whole(self, name: str) -> ParameterState:
        """Master weight and Adam moments of one parameter, as full tensors on every rank. Collective."""
        return ParameterState(**{kind: tensor.detach() for kind, tensor in self.read(name)})

    @torch.no_grad()
    def load(self, step_count: int, read: Callable[[str], Mapping[str, Tensor]]) -> None:
        """Overwrite the step count, and the tensors of each parameter by those that `read` returns for its name, by
        kind. Collective."""
        for stepped in self._stepped():
            self.torch_optimizer.state[stepped]["step"].fill_(float(step_count))
        for name in self.parameters:
            self._write(name, read(name))
        if self.stage in (1, 2):
            self.engine.optimizer.update_lp_params()
        self.forget_gradients()

    def _write(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Overwrite a parameter's tensors, by kind, with full tensors, and set the parameter to the rounded master
        weight."""
        import deepspeed
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

        parameter = self.parameters[name]
        if not self.stage:
            master = self.masters_apart[id(parameter)]
            master.data.copy_(tensors["master"])
            for kind in self.kinds[1:]:
                self.torch_optimizer.state[master][kind].copy_(tensors[kind])
            parameter.data.copy_(master.data)
            return
        on_device = {kind: tensor.to(parameter.device) for kind, tensor in tensors.items()}
        safe_set_full_fp32_param(parameter, on_device["master"])
        for kind in self.kinds[1:]:
            safe_set_full_optimizer_state(parameter, on_device[kind], kind)
        if self.stage == 3:
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
                parameter.data.copy_(on_device["master"])

    def move_averages(self, step: int) -> None:
        """Move the averages toward the master weights, after optimizer step `step`, counted from 1."""
        if AVERAGE in self.kinds:
            masters = list(self._stepped())
            move_averages(self._averages(masters), masters, self.training, step)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Put the moving averages into the model's parameters inside this context. Changes no state. Collective.

        Raises `UnsupportedError` without `ema_decay`.
        """
        if AVERAGE not in self.kinds:
            raise UnsupportedError("outputs of the moving average are wanted, but ema_decay is not set")
        self._exchange_averages()
        try:
            yield
        finally:
            self._exchange_averages()

    @torch.no_grad()
    def _exchange_averages(self) -> None:
        """Exchange master weights and averages, and set the parameters to the rounded master weights."""
        masters, optimizer = list(self._stepped()), self.engine.optimizer
        exchange(masters, self._averages(masters))
        if not self.stage:
            for parameter in self.parameters.values():
                parameter.data.copy_(self.masters_apart[id(parameter)].data)
        elif self.stage < 3:
            optimizer.update_lp_params()
        else:
            # As DeepSpeed does after a step; no function of its interface does it without one.
            optimizer._partition_all_parameters()
            for index in range(len(masters)):
                optimizer._reassign_or_swap_out_partitioned_parameters(index)
            if optimizer.persistent_parameters:
                optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)

    def _averages(self, masters: Sequence[Tensor]) -> list[Tensor]:
        return [self.torch_optimizer.state[master][AVERAGE] for master in masters]

    def forget_gradients(self) -> None:
        """Drop all gradients, including those of backward passes that no optimizer step followed.

        Stages 1 and 2 accumulate gradients in lists of their own, which `zero_grad` does not clear.
        """
        optimizer = self.engine.optimizer
        optimizer.zero_grad()
        for attribute in ("averaged_gradients", "all_grad_tensors") if self.stage in (1, 2) else ():
            getattr(optimizer, attribute).clear()
        if getattr(optimizer, "cpu_offload", False):
            optimizer.reset_cpu_buffers()
            # As after a step: the next backward pass overwrites the host buffers instead of adding to them.
            optimizer.micro_step_id = -1
        self.zero_buffers()

    def zero_buffers(self) -> None:
        """Zero the gradients that DeepSpeed keeps between steps: at stage 3, and from stage 1 on in host memory.

        The first backward pass overwrites them, but only those of parameters that it uses. Others, such as those of an
        expert that no row needs, would keep the gradients of the step before.
        """
        for gradient in self.gradients():
            gradient.zero_()

    def gradients(self) -> list[Tensor]:
        """All gradient tensors of this rank except `scratch`."""
        optimizer = self.engine.optimizer
        tensors = [parameter.grad for parameter in (*self.parameters.values(), *self._apart())]
        if self.stage == 3:
            tensors.append(optimizer.grad_partitions_flat_buffer)
        for attribute in ("averaged_gradients", "all_grad_tensors") if self.stage in (1, 2) else ():
            for group in getattr(optimizer, attribute, {}).values():
                tensors += group or []
        tensors += getattr(optimizer, "accumulated_grads_in_cpu", {}).values()
        return [tensor for tensor in tensors if tensor is not None]

    def scratch(self) -> list[Tensor]:
        """Stage 3: the reduction buffers, of `reduce_bucket_size` elements. They are empty between backward passes."""
        buckets = self.engine.optimizer.ipg_buckets.values() if self.stage == 3 else ()
        return [bucket.buffer for bucket in buckets if bucket.buffer is not None]

    def optimizer_state(self) -> list[Tensor]:
        """This rank's optimizer state: moments, averages, step counts, and master weights that are not the parameters
        themselves."""
        return [*self._apart(), *(value for entry in self.torch_optimizer.state.values() for value in entry.values())]

    def _apart(self) -> list[Tensor]:
        """Master weights that are not the parameters themselves."""
        parameters = {id(parameter) for parameter in self.parameters.values()}
        return [stepped for stepped in self._stepped() if id(stepped) not in parameters]

    def _stepped(self) -> Iterator[Tensor]:
        """The tensors that torch's optimizer updates: parameters, their master weights, or flat partitions of master
        weights."""
        if self.stage == 3:
            # DeepSpeed adds them to torch's parameter groups only during the step.
            yield from self.engine.optimizer.fp32_partitioned_groups_flat
            return
        for group in self.torch_optimizer.param_groups:
            yield from group["params"]


def by_kind(state: ParameterState) -> dict[str, Tensor]:
    """The tensors of a parameter's portable state, as `OptimizerState.load` takes them."""
    return {field.name: getattr(state, field.name) for field in fields(state)}


SCALE_FIELDS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""State of a dynamic loss scale; a fixed one has only `cur_scale`."""


class LossScale:
    """Loss scale of one engine; inactive unless the model is float16 (which requires ZeRO stages 1 to 3)."""

    def __init__(self, engine: Any) -> None:
        scaler: Any = engine.optimizer.loss_scaler if engine.fp16_enabled() else None
        self._scaler = scaler
        if self._falls:
            # At the minimum scale, DeepSpeed would raise. Skip the step instead, as in other dtypes: the scale is not
            # the cause.
            self._scaler.raise_error_at_min_scale = False
        self._first = self.state()

    @property
    def can_fall(self) -> bool:
        """True if a lower loss scale may remove the overflow of a gradient."""
        return self._falls and self._scaler.cur_scale > self._scaler.min_scale

    @property
    def _falls(self) -> bool:
        return self._scaler is not None and bool(self._scaler.dynamic)

    def state(self) -> dict[str, float]:
        """State for `restore`; empty if the model is not float16."""
        if self._scaler is None:
            return {}
        return {field: getattr(self._scaler, field) for field in SCALE_FIELDS if hasattr(self._scaler, field)}

    def begin_anew(self) -> None:
        """Reset the loss scale to its initial state."""
        self.restore(self._first)

    def restore(self, state: Mapping[str, float]) -> None:
        """Restore the state of a dynamic loss scale. A fixed scale keeps the configured value."""
        if self._falls:
            for field, value in state.items():
                setattr(self._scaler, field, value)
