"""Where DeepSpeed's optimizers keep masters and moments, and how each is read and written as a whole tensor.

| what steps | masters | moments |
|---|---|---|
| stage 0, float32 | the parameters | torch's state of the parameters |
| stage 0, 16 bit | `fp32_groups`, one for each parameter | torch's state of those |
| stages 1 to 3 | flat partitions, reached by DeepSpeed's own accessors | torch's state of those |
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from roll_modeling.optimizer import MOMENTS, moments
from roll_strategy_deepspeed.workarounds import make_moments_known

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import torch
    from torch import Tensor, nn


class HeldState:
    """Of one engine. All ranks read and write together, in the order of `parameters`."""

    def __init__(self, engine: Any, parameters: Mapping[str, nn.Parameter], *, stage: int) -> None:
        """`parameters` are those that are trained, by name. Makes the moments, if no step was taken yet."""
        self.engine, self.parameters, self.stage = engine, dict(parameters), stage
        self.torch_optimizer: torch.optim.AdamW = engine.basic_optimizer
        for each in self._stepped():
            moments(self.torch_optimizer, each)
        if stage in (1, 2):
            make_moments_known(engine)

    @property
    def masters_apart(self) -> dict[int, Tensor]:
        """Stage 0: the tensor that is stepped in place of each parameter, by the parameter's id."""
        lists = getattr(self.engine.optimizer, "fp16_groups", None)
        if lists is None:
            return {id(each): each for each in self.parameters.values()}
        pairs = zip(lists, self.engine.optimizer.fp32_groups, strict=True)
        return {id(low): high for lows, highs in pairs for low, high in zip(lows, highs, strict=True)}

    def read(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """`master` and the moments, whole, on every rank; good until the next is read."""
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        parameter = self.parameters[name]
        if not self.stage:
            master = self.masters_apart[id(parameter)]
            yield "master", master
            yield from zip(MOMENTS, moments(self.torch_optimizer, master), strict=True)
            return
        yield "master", safe_get_full_fp32_param(parameter)
        for moment in MOMENTS:
            yield moment, safe_get_full_optimizer_state(parameter, moment)

    def begin_writing(self, step_count: int) -> None:
        """Before the first `write`."""
        for each in self._stepped():
            self.torch_optimizer.state[each]["step"].fill_(float(step_count))

    def write(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """`master` and the moments; the parameter becomes the rounded master."""
        import deepspeed
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

        parameter = self.parameters[name]
        if not self.stage:
            master = self.masters_apart[id(parameter)]
            for held, kind in zip((master, *moments(self.torch_optimizer, master)), tensors, strict=True):
                held.data.copy_(tensors[kind])
            parameter.data.copy_(master.data)
            return
        on_device = {kind: each.to(parameter.device) for kind, each in tensors.items()}
        safe_set_full_fp32_param(parameter, on_device["master"])
        for moment in MOMENTS:
            safe_set_full_optimizer_state(parameter, on_device[moment], moment)
        if self.stage == 3:
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
                parameter.data.copy_(on_device["master"])

    def end_writing(self) -> None:
        """After the last `write`: what is derived from masters."""
        if self.stage in (1, 2):
            self.engine.optimizer.update_lp_params()
        self.forget_gradients()

    def forget_gradients(self) -> None:
        """Those of backward passes that no step followed, too: stages 1 and 2 add them up in lists of their own."""
        optimizer = self.engine.optimizer
        optimizer.zero_grad()
        for kept in ("averaged_gradients", "all_grad_tensors") if self.stage in (1, 2) else ():
            getattr(optimizer, kept).clear()
        if getattr(optimizer, "cpu_offload", False):
            optimizer.reset_cpu_buffers()
            # As after a step: the next backward pass overwrites what lies on the host, instead of adding to it.
            optimizer.micro_step_id = -1

    def gradients(self) -> list[Tensor]:
        """All that this rank holds of them, but for `scratch`."""
        optimizer = self.engine.optimizer
        found = [each.grad for each in (*self.parameters.values(), *self._apart())]
        if self.stage == 3:
            found.append(optimizer.grad_partitions_flat_buffer)
        for kept in ("averaged_gradients", "all_grad_tensors") if self.stage in (1, 2) else ():
            for group in getattr(optimizer, kept, {}).values():
                found += group or []
        found += getattr(optimizer, "accumulated_grads_in_cpu", {}).values()
        return [each for each in found if each is not None]

    def scratch(self) -> list[Tensor]:
        """Where gradients are reduced at stage 3, of `reduce_bucket_size`; between backward passes nothing is in it."""
        buckets = self.engine.optimizer.ipg_buckets.values() if self.stage == 3 else ()
        return [each.buffer for each in buckets if each.buffer is not None]

    def optimizer_state(self) -> list[Tensor]:
        """Masters and moments that this rank holds."""
        return [*self._apart(), *(each for entry in self.torch_optimizer.state.values() for each in entry.values())]

    def _apart(self) -> list[Tensor]:
        """Masters that are not the parameters themselves."""
        own = {id(each) for each in self.parameters.values()}
        return [each for each in self._stepped() if id(each) not in own]

    def _stepped(self) -> Iterator[Tensor]:
        """What torch's optimizer steps: parameters, masters of them, or flat partitions of masters."""
        if self.stage == 3:
            # Which shows them to torch's optimizer only while it steps them.
            yield from self.engine.optimizer.fp32_partitioned_groups_flat
            return
        for group in self.torch_optimizer.param_groups:
            yield from group["params"]
