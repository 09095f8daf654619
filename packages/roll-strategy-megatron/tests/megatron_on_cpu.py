"""Lets megatron-core's own code run without an accelerator: importing this module is enough, before megatron or after.

megatron-core asks for CUDA by name. Each of its modules gets a stand-in for its global `torch`, in which the names that
need a device are replaced; torch itself stays as it is for everyone else, but for methods of tensors, which have no
other door. The plugin knows nothing of this: on its platform it uses megatron-core as it is.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import sys
import types

import torch
import torch.distributed as dist

DEVICE = torch.device("cpu")
"""What Megatron takes for its GPU. Set it before Megatron runs; a simulated device is one as well."""
FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange", "rand", "randn", "zeros_like", "empty_like")


class Nothing:
    """Stands for streams and events: everything has happened already."""

    def __init__(self, *arguments, **options):
        pass

    def __getattr__(self, name):
        return lambda *arguments, **options: self

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None


class StandIn(types.ModuleType):
    """A module with some names replaced."""

    def __init__(self, real, **replaced):
        super().__init__(real.__name__)
        self.__dict__.update(replaced, _real=real)

    def __getattr__(self, name):
        return getattr(self.__dict__["_real"], name)


class OnImport(importlib.abc.MetaPathFinder):
    """Changes modules of megatron as soon as they have been executed."""

    def find_spec(self, name, path, target=None):
        if not name.startswith("megatron."):
            return None
        found = (each.find_spec(name, path, target) for each in sys.meta_path if each is not self)
        spec = next((each for each in found if each is not None), None)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            execute = spec.loader.exec_module

            def then_change(module):
                execute(module)
                change(module)

            spec.loader.exec_module = then_change
        return spec


def means_cuda(device):
    return getattr(device, "type", device) == "cuda" or (isinstance(device, str) and device.startswith("cuda:"))


def on_cpu(factory):
    @functools.wraps(factory)
    def made(*arguments, **options):
        if means_cuda(options.get("device")):
            options["device"] = DEVICE
        options.pop("pin_memory", None)
        return factory(*arguments, **options)

    return made


def all_gather(tensors, tensor, group=None, **options):
    """Of shares that differ in size, which NCCL takes and gloo does not."""
    if len({each.shape for each in tensors}) == 1:
        return dist.all_gather(tensors, tensor, group=group, **options)
    for rank, each in enumerate(tensors):
        if rank == dist.get_rank(group):
            each.copy_(tensor)
        dist.broadcast(each, group=group, group_src=rank)
    return None


def reduce_scatter(output, tensors, group=None, **options):
    """The same on the way back."""
    if len({each.shape for each in tensors}) == 1:
        return dist.reduce_scatter(output, tensors, group=group, **options)
    for rank, each in enumerate(tensors):
        whole = each.clone()
        dist.all_reduce(whole, group=group)
        if rank == dist.get_rank(group):
            output.copy_(whole)
    return None


def change(module):
    if getattr(module, "torch", None) is torch:
        module.torch = STAND_IN
    if module.__name__ == "megatron.core.tensor_parallel.random":
        module._get_cuda_rng_state = lambda *arguments, **options: torch.get_rng_state()
        module._set_cuda_rng_state = lambda state, *arguments, **options: torch.set_rng_state(state)
    if hasattr(module, "maybe_move_tensor_to_cpu"):
        # As it does with a tensor on a device; one that is on the host already it would not turn into an array.
        module.maybe_move_tensor_to_cpu = lambda tensor, as_numpy=False, record_stream=False: (
            tensor.detach().numpy() if as_numpy and torch.is_tensor(tensor) else tensor
        )


def change_tensors():
    to, kind = torch.Tensor.to, torch.Tensor.type

    def to_cpu(tensor, *arguments, **options):
        if means_cuda(options.get("device")):
            options["device"] = DEVICE
        return to(tensor, *(DEVICE if means_cuda(each) else each for each in arguments), **options)

    def kind_on_cuda(tensor, *arguments, **options):
        """Megatron's optimizers compare this text."""
        found = kind(tensor, *arguments, **options)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if arguments or options or not caller.startswith("megatron."):
            return found
        return found.replace("torch.sim.", "torch.").replace("torch.", "torch.cuda.", 1)

    to_host, is_cuda = torch.Tensor.cpu, torch._C.TensorBase.is_cuda

    def on_host(tensor, *arguments, **options):
        found = to_host(tensor, *arguments, **options)
        found.is_on_host = True
        return found

    def on_device(tensor):
        """Megatron's optimizer on the host looks which tensors it has copied there."""
        if sys._getframe(1).f_globals.get("__name__", "").endswith(".hybrid_optimizer"):
            return not getattr(tensor, "is_on_host", False)
        return is_cuda.__get__(tensor)

    torch.Tensor.cpu, torch.Tensor.is_cuda = on_host, property(on_device)
    torch.Tensor.to, torch.Tensor.type = to_cpu, kind_on_cuda
    torch.Tensor.cuda = lambda tensor, *arguments, **options: to(tensor, DEVICE, non_blocking=True)
    torch.Tensor.pin_memory = lambda tensor, *arguments, **options: tensor
    torch.Tensor.record_stream = lambda tensor, stream: None


STAND_IN = StandIn(
    torch,
    cuda=StandIn(
        torch.cuda,
        current_device=lambda: DEVICE,
        Stream=Nothing,
        Event=Nothing,
        stream=lambda stream=None: contextlib.nullcontext(),
        current_stream=lambda *arguments: Nothing(),
        default_stream=lambda *arguments: Nothing(),
        synchronize=lambda *arguments: None,
        get_rng_state=lambda device="cuda": torch.get_rng_state(),
        set_rng_state=lambda state, device="cuda": torch.set_rng_state(state),
    ),
    distributed=StandIn(dist, all_gather=all_gather, reduce_scatter=reduce_scatter),
    **{name: on_cpu(getattr(torch, name)) for name in FACTORIES},
)

if not torch.cuda.is_available():
    change_tensors()
    for each in [module for name, module in sys.modules.items() if name.startswith("megatron.") and module]:
        change(each)
    sys.meta_path.insert(0, OnImport())
