"""Test group *adapters*: only the trained adapter is published, and the engine applies it to the started model."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch

from roll_core.errors import CorruptTensorError, MissingTensorError, UnexpectedTensorError
from roll_testing.infer.kit import RANK, InferKit
from roll_testing.infer.weights import has_digests
from roll_testing.programs import expect, raised

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from roll_testing.infer.engine import Engine, Setup
    from roll_testing.infer.models import Oracle

    EngineOf = Callable[[Setup], Engine]

SIZE = 0.6
"""Size of an adapter's change relative to the weight."""


class AdapterTests(InferKit):
    """Tests of strategies that declare `lora`, started with `adapter_config` in addition to their configuration."""

    def test_an_adapter_is_applied_to_the_model(self, engine_of: EngineOf, setup: Setup, oracle: Oracle) -> None:
        """Logprobs must be those of the base model before a publish, and those of W + B A after it.

        Each publish replaces the adapter before it, on all linear layers or on some. The receipt must have the digests
        of A and B, and of nothing else.
        """
        self.need(self.can.lora, "lora")
        engine = self._unpublished(engine_of, self._with_adapters(setup))
        self.check_outputs(engine, setup, oracle)
        stored = self.stored(setup)
        layers = _layers(stored)
        some = [layer for layer in layers if layer.rpartition(".")[2] in ("q_proj", "down_proj")]
        for seed, targets in enumerate((layers, layers, some or layers[:1])):
            adapter = self.published(random_adapter(stored, targets, seed), setup.model)
            receipt = engine.publish(adapter)
            has_digests(receipt, adapter, "the adapter")
            self.check_outputs(engine, setup, oracle, merged(stored, adapter))

    def test_an_adapter_that_does_not_fit_is_named(self, engine_of: EngineOf, setup: Setup, oracle: Oracle) -> None:
        """A missing, unknown or misshapen tensor must raise a `WeightSyncError` of its own class that names the tensor.

        The next good publish must work.
        """
        self.need(self.can.lora, "lora")
        engine = engine_of(self._with_adapters(setup))
        stored = self.stored(setup)
        good = self.published(random_adapter(stored, _layers(stored), 5), setup.model)
        name = list(good)[len(good) // 2]
        rest = {other: tensor for other, tensor in good.items() if other != name}
        longer = torch.cat([good[name]] * 2)
        surprise = {"model.layers.99.mlp.up_proj.lora_A.weight": good[name]}
        for announced, sent, kind, culprit in (
            (good, rest, MissingTensorError, name),
            ({**good, **surprise}, {**good, **surprise}, UnexpectedTensorError, next(iter(surprise))),
            (good, {**good, name: longer}, CorruptTensorError, name),
        ):
            error = raised(partial(engine.publish, announced, sent=list(sent.items())))
            expect(error, kind, f"an adapter whose {culprit} does not fit", culprit)
            engine.publish(good)
        self.check_outputs(engine, setup, oracle, merged(stored, good))

    def test_adapters_over_a_lower_precision_stay_in_bounds(
        self, engine_of: EngineOf, setup: Setup, low_dtype: str
    ) -> None:
        """Low-precision logprobs must stay within bounds of a reference whose model and adapter are rounded alike."""
        self.need(self.can.lora, "lora")
        if low_dtype != self.dtypes()[-1]:
            pytest.skip("one of the lower precisions is enough")
        setup = setup.with_(model=replace(setup.model, dtype=low_dtype))
        engine, oracle = engine_of(self._with_adapters(setup)), self.oracle_of(setup.model)
        stored = self.published(self.stored(setup), setup.model)
        oracle.take(stored)
        adapter = self.published(random_adapter(stored, _layers(stored), 6), setup.model)
        engine.publish(adapter)
        self.check_outputs(engine, setup, oracle, merged(stored, adapter))


def _layers(weights: Mapping[str, Tensor]) -> list[str]:
    """Return the linear layers except the head, as `all-linear` selects them."""
    layers = [name.removesuffix(".weight") for name, weight in weights.items() if weight.ndim == 2]
    return [name for name in layers if "embed" not in name and not name.startswith("lm_head")]


def random_adapter(
    weights: Mapping[str, Tensor], layers: Sequence[str], seed: int, ranks: Mapping[str, int] | None = None
) -> dict[str, Tensor]:
    """Return a random adapter under the names of `TrainStrategy.export_adapters`.

    It changes each layer by more than half of the layer's own size. `ranks`: by the last part of a layer's name, if it
    is not `RANK`.
    """
    source = torch.Generator().manual_seed(seed)
    adapter = {}
    for layer in layers:
        weight = weights[f"{layer}.weight"].float()
        size = SIZE * float(weight.std(correction=0))
        rank = (ranks or {}).get(layer.rpartition(".")[2], RANK)
        adapter[f"{layer}.lora_A.weight"] = torch.randn(rank, weight.shape[1], generator=source) / rank**0.5
        adapter[f"{layer}.lora_B.weight"] = size * torch.randn(weight.shape[0], rank, generator=source)
    return adapter


def merged(weights: Mapping[str, Tensor], adapter: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights with W + B A merged, computed in float64 and rounded to float32."""
    result = dict(weights)
    for name, a in adapter.items():
        if name.endswith(".lora_A.weight"):
            layer = name.removesuffix(".lora_A.weight")
            b = adapter[f"{layer}.lora_B.weight"]
            result[f"{layer}.weight"] = weights[f"{layer}.weight"].double().add(b.double() @ a.double()).float()
    return result
