"""Rows of module programs: their batches, their shares of data-parallel ranks, and checks of what programs return."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from roll_core.data.pack import balance_sizes
from roll_core.errors import ContractError, DataError
from roll_core.spec.module_program import LossOutput, ModuleBatch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from roll_core.spec.module_program import ModuleLoss, ModuleProgram, ModuleRow, ProgramModule


def check_rows(rows: Iterable[ModuleRow]) -> None:
    """Raise `DataError` for an array that is no numpy array of numbers."""
    for row in rows:
        for name, array in row.arrays.items():
            is_array = isinstance(array, (np.ndarray, np.generic))
            if not is_array or array.dtype.kind not in "biuf":
                kind = f"dtype {array.dtype}" if is_array else type(array).__name__
                raise DataError(f"row {row.id}: {name} has {kind}; expected a numpy array of numbers")


def balance_rows(rows: Sequence[ModuleRow], ranks: int) -> list[list[int]]:
    """Assign rows to data-parallel ranks by the sizes of their arrays; returns each rank's ascending indices."""
    return balance_sizes([sum(array.size for array in row.arrays.values()) for row in rows], ranks)


def module_batches(
    rows: Sequence[ModuleRow], *, max_rows: int, total_rows: int = 1, epoch: int = 0
) -> list[tuple[list[int], ModuleBatch]]:
    """Batches of at most `max_rows` rows with equal names, shapes and dtypes of arrays; each with its rows' indices."""
    import torch

    alike: dict[Any, list[int]] = {}
    for index, row in enumerate(rows):
        form = tuple((name, array.shape, array.dtype.str) for name, array in sorted(row.arrays.items()))
        alike.setdefault(form, []).append(index)
    batches = []
    for indices in alike.values():
        for start in range(0, len(indices), max_rows):
            part = indices[start : start + max_rows]
            tensors = {
                name: torch.from_numpy(np.stack([rows[index].arrays[name] for index in part]))
                for name in rows[part[0]].arrays
            }
            ids = tuple(rows[index].id for index in part)
            batches.append((part, ModuleBatch(ids=ids, tensors=tensors, total_rows=total_rows, epoch=epoch)))
    return batches


def output_rows(outputs: Mapping[str, Tensor], num_rows: int) -> list[Mapping[str, NDArray[np.generic]]]:
    """Outputs of each row of a batch. bfloat16 becomes float32, because numpy has no bfloat16."""
    import torch

    arrays = {}
    for name, tensor in outputs.items():
        here = tensor.detach().cpu()
        arrays[name] = (here.float() if here.dtype == torch.bfloat16 else here).numpy()
    return [{name: array[index] for name, array in arrays.items()} for index in range(num_rows)]


def checked_program(program: ModuleProgram) -> ModuleProgram:
    """The program with checked outputs. Raises `ContractError`, which names the program and its package."""
    import torch

    def checked(module: ProgramModule, batch: ModuleBatch) -> Mapping[str, Tensor]:
        outputs: Any = program(module, batch)
        if not isinstance(outputs, Mapping):
            raise ContractError(f"{program_name(program)} returned {type(outputs).__name__}, expected a mapping")
        for name, tensor in outputs.items():
            if not isinstance(tensor, torch.Tensor) or tensor.shape[:1] != (len(batch.ids),):
                raise ContractError(
                    f"{program_name(program)}: output {name!r} has {_described(tensor)}; expected a tensor"
                    f" [{len(batch.ids)}, ...] with a first dimension of the batch's rows"
                )
        return outputs

    return checked


def checked_loss(loss: ModuleLoss) -> ModuleLoss:
    """The loss with a checked result, like `checked_program`. Strategies check that it is finite."""
    import torch

    def checked(module: ProgramModule, batch: ModuleBatch) -> LossOutput:
        output: Any = loss(module, batch)
        if not isinstance(output, LossOutput):
            raise ContractError(f"{program_name(loss)} returned {type(output).__name__}, expected a LossOutput")
        if not isinstance(output.loss, torch.Tensor) or output.loss.ndim:
            raise ContractError(
                f"{program_name(loss)}: the loss has {_described(output.loss)}; expected a scalar tensor"
            )
        for name, value in output.metrics.items():
            if not isinstance(value, (int, float)) and not (isinstance(value, torch.Tensor) and value.numel() == 1):
                raise ContractError(
                    f"{program_name(loss)}: metric {name!r} has {_described(value)}; expected a number or a scalar"
                    " tensor"
                )
        return output

    return checked


def _described(value: object) -> str:
    """Shape of a tensor or array, or another value's type."""
    shape = getattr(value, "shape", None)
    return type(value).__name__ if shape is None else f"shape {list(shape)}"


def program_name(program: object) -> str:
    """Description of a program with its distribution, for errors: `program mine.sampling.sample of acme 1.2`."""
    from importlib import metadata

    function = getattr(program, "func", program)
    kind: Any = function if hasattr(function, "__qualname__") else type(function)
    top, owner = kind.__module__.partition(".")[0], ""
    # An editable installation lists no modules: a distribution then has the name of its module.
    for package in (*metadata.packages_distributions().get(top, ()), top):
        with contextlib.suppress(metadata.PackageNotFoundError):
            distribution = metadata.distribution(package)
            owner = f" of {distribution.name} {distribution.version}"
            break
    return f"program {kind.__module__}.{kind.__qualname__}{owner}"
