"""A training step for which the host does not wait: batches move to the device ahead of their passes, and losses and
metrics stay there until all passes are launched.

    MicroBatch ─► moved_ahead ─► passes ─► PendingLosses.add ─► … ─► read: one copy to the host, for all microbatches

Shapes: T flat tokens, K ids, B rows of a batch.
"""

from __future__ import annotations

import math
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, TypeGuard, TypeVar

import torch
import torch.distributed as dist

from roll_core.errors import NonFiniteError
from roll_core.spec.module_program import ModuleBatch
from roll_core.spec.train import MicroBatch, TokenOutputs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import Tensor

    from roll_core.spec.train import LossMetrics, LossOutput
    from roll_modeling.process_group import ProcessGroup

Batch = TypeVar("Batch", MicroBatch, ModuleBatch)

INPUTS = ("old_logprobs", "ref_logprobs", "advantages", "returns", "values")
"""Inputs of losses that an error names, as fields `<name>_T` of `MicroBatch`."""


def moved_ahead(batches: Iterable[Batch], device: torch.device | str) -> Iterator[tuple[Batch, Batch]]:
    """Each batch, and its copy on `device`.

    Copies run on a stream of their own: the next batch arrives while the device computes the present one.
    """
    device = torch.device(device)
    if device.type == "cpu":
        yield from ((batch, batch.to(device)) for batch in batches)
        return
    module = torch.get_device_module(device)
    copies = module.Stream(device)
    for batch in batches:
        with module.stream(copies):
            moved = batch.to(device)
        passes = module.current_stream(device)
        passes.wait_stream(copies)
        for tensor in _tensors(moved):
            tensor.record_stream(passes)  # the allocator must not reuse its memory for copies before the passes end
        yield batch, moved


def _tensors(batch: MicroBatch | ModuleBatch) -> Iterator[Tensor]:
    if isinstance(batch, ModuleBatch):
        yield from batch.tensors.values()
        return
    yield from batch.streams.values()
    for field in fields(batch):
        if isinstance(value := getattr(batch, field.name), torch.Tensor):
            yield value


class PendingLosses:
    """Losses and metrics of the batches of one call, which stay on the device until `read`.

    Only then is a loss found that is not finite: its backward pass has run, and the caller must drop the gradients.
    """

    def __init__(self, device: torch.device | str, group: ProcessGroup | None = None) -> None:
        """`group` has the ranks that call `read` together."""
        self._device = torch.device(device)
        self._group = group if group is not None and group.size > 1 else None
        self._losses: list[tuple[Tensor, Callable[[float], NonFiniteError]]] = []
        self._metrics: list[dict[str, Tensor | float]] = []
        self._error: NonFiniteError | None = None

    def add(self, output: LossOutput, error_of: Callable[[float], NonFiniteError]) -> None:
        """Keep the loss and metrics of a batch. `error_of` makes the error if the loss has this value, not finite."""
        self._losses.append((output.loss.detach(), error_of))
        self._metrics.append(
            {
                name: value.detach() if isinstance(value, torch.Tensor) else value
                for name, value in output.metrics.items()
            }
        )

    def add_tokens(self, output: LossOutput, outputs: TokenOutputs, micro: MicroBatch) -> None:
        """`add` for a microbatch, which may be on the host, with the outputs that the loss read."""
        self.add(output, partial(non_finite_tokens, outputs=_per_token(outputs), micro=micro))

    def add_rows(self, output: LossOutput, batch: ModuleBatch) -> None:
        """`add` for a batch of a module program, which may be on the host."""
        self.add(output, partial(non_finite_rows, batch=batch))

    def fail(self, error: NonFiniteError) -> None:
        """Keep an error that a loss raised itself. `read` raises it on every rank."""
        self._error = self._error or error

    def read(self) -> list[LossMetrics]:
        """Metrics of each batch. The host waits for the device once. Collective over the group.

        Raises `NonFiniteError` on every rank if a loss of any rank is not finite.
        """
        scalars = [loss for loss, _ in self._losses]
        scalars += [value for metrics in self._metrics for value in metrics.values() if self._on_device(value)]
        if self._group is not None:
            scalars.append(self._any_failed())
        numbers = iter(self._floats(scalars))
        for value, (_, error_of) in [(next(numbers), value) for value in self._losses]:
            if self._error is None and not math.isfinite(value):
                self._error = error_of(value)
        metrics = [
            {name: next(numbers) if self._on_device(value) else float(value) for name, value in every.items()}
            for every in self._metrics
        ]
        if self._group is None and self._error is not None:
            raise self._error
        if self._group is not None and next(numbers):
            self._group.raise_together(self._error)
        return metrics

    def _on_device(self, value: Tensor | float) -> TypeGuard[Tensor]:
        return isinstance(value, torch.Tensor) and value.device.type == self._device.type

    def _floats(self, scalars: list[Tensor]) -> list[float]:
        """Values of tensors of one element, in one copy, exactly."""
        if not scalars:
            return []
        exact = torch.float32 if all(scalar.dtype == torch.float32 for scalar in scalars) else torch.float64
        numbers: list[float] = torch.stack([scalar.reshape(()).to(self._device, exact) for scalar in scalars]).tolist()
        return numbers

    def _any_failed(self) -> Tensor:
        """1 if a loss of any rank is not finite, else 0; on the device. Collective."""
        failed = torch.full((), float(self._error is not None), device=self._device)
        if self._losses:
            losses = torch.stack([loss.reshape(()).to(self._device, torch.float32) for loss, _ in self._losses])
            failed = failed.maximum((~torch.isfinite(losses)).any().float())
        dist.all_reduce(failed, dist.ReduceOp.MAX)
        return failed


def _per_token(outputs: TokenOutputs) -> TokenOutputs:
    """Outputs without gradients, `[T]`: sums over the K values of a token, which are finite if all of them are."""
    values = {field.name: getattr(outputs, field.name) for field in fields(outputs)}
    return TokenOutputs(
        **{
            name: tensor.detach() if tensor.ndim == 1 else tensor.detach().flatten(1).sum(dim=1)
            for name, tensor in values.items()
            if tensor is not None and tensor.is_floating_point()
        }
    )


def non_finite_tokens(loss: float, outputs: TokenOutputs, micro: MicroBatch) -> NonFiniteError:
    """Error for a loss of tokens. Names the first value that is not finite, and the sequences of all such values.

    These are outputs, and inputs of tokens that the loss reads. If all are finite, names the whole microbatch.
    """
    micro, outputs = micro.to("cpu"), _per_token(outputs)
    read_T = micro.read_T
    values_T = {field.name: getattr(outputs, field.name) for field in fields(outputs)}
    values_T |= {f"{name}_T": getattr(micro, f"{name}_T") for name in INPUTS if values_T.get(f"{name}_T") is None}
    bad: list[tuple[bool, int, str, float]] = []
    for name, tensor in values_T.items():
        if tensor is not None:
            bad_T = ~torch.isfinite(tensor.cpu())
            if getattr(outputs, name, None) is None:
                bad_T &= read_T
            tokens = bad_T.nonzero()[:, 0].tolist()
            bad += [(not read_T[token], token, name.rpartition("_")[0], float(tensor[token])) for token in tokens]
    if not bad:
        return NonFiniteError(
            f"the loss is {loss}, although all outputs and inputs are finite: a term overflowed on sequences"
            f" {', '.join(micro.ids)}"
        )
    _, token, name, value = min(bad)
    sequences = [micro.ids[i] for i in sorted({int(micro.segments_T[t]) for _, t, _, _ in bad})]
    return NonFiniteError(
        f"the loss is {loss}: {name} is {value} at token {int(micro.positions_T[token])} of sequence"
        f" {micro.ids[int(micro.segments_T[token])]}; values are not finite in sequences {', '.join(sequences)}"
    )


def non_finite_rows(loss: float, batch: ModuleBatch) -> NonFiniteError:
    """Error for the loss of a module program. Names the rows with an input that is not finite, or else all rows."""
    for name, tensor in batch.to("cpu").tensors.items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            bad_B = ~torch.isfinite(tensor.reshape(len(tensor), -1)).all(dim=1)
            rows = ", ".join(batch.ids[row] for row in bad_B.nonzero()[:, 0].tolist())
            return NonFiniteError(f"the loss is {loss}: input {name} is not finite in rows {rows}")
    return NonFiniteError(
        f"the loss is {loss} although every input is finite; it came from rows {', '.join(batch.ids)}"
    )
