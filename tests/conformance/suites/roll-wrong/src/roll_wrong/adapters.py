"""Engines that serve adapters: one that does it right, and some that do not."""

from __future__ import annotations

from roll_core.errors import CorruptTensorError, MissingTensorError, UnexpectedTensorError
from roll_core.spec.weights import make_receipt
from roll_wrong.engine import RightEngine


class RightWithAdapters(RightEngine):
    """One adapter at a time, on top of the table."""

    async def start(self, model, mesh):
        await super().start(model, mesh)
        self.base, self.lora, self.dtype = self.held, model.lora, model.dtype

    async def update_weights(self, version, manifest, tensors, *, shared=False):
        if self.lora is None:
            return await super().update_weights(version, manifest, tensors, shared=shared)
        self.ready()
        arrived = {name: tensor.clone() for name, tensor in tensors}
        size = len(self.base["bias"])
        self.fit(
            {"table.lora_A.weight": (self.lora.rank, size), "table.lora_B.weight": (size, self.lora.rank)}, arrived
        )
        self.hold_adapter(arrived["table.lora_A.weight"], arrived["table.lora_B.weight"])
        self.version = version
        self.updated()
        return make_receipt(manifest, arrived.items())

    def fit(self, wanted, arrived):
        for name in arrived:
            if name not in wanted:
                raise UnexpectedTensorError(f"the model has no layer for {name}")
        for name, shape in wanted.items():
            if name not in arrived:
                raise MissingTensorError(f"no {name} arrived")
            if tuple(arrived[name].shape) != shape:
                raise CorruptTensorError(f"{name} arrived as {tuple(arrived[name].shape)}")

    def hold_adapter(self, a, b):
        table = self.beneath()["table.weight"].double() + b.double() @ a.double()
        self.held = {**self.base, "table.weight": table.float()}

    def beneath(self):
        return self.base


class AdaptersPileUp(RightWithAdapters):
    """Puts each adapter on top of the one before."""

    def beneath(self):
        return self.held


class UnknownAdapterIgnored(RightWithAdapters):
    """Overlooks adapters of layers that it does not have."""

    def fit(self, wanted, arrived):
        super().fit(wanted, {name: each for name, each in arrived.items() if name in wanted})


class AdapterLostInBf16(RightWithAdapters):
    """Has no adapters in bf16, and does not say so."""

    def hold_adapter(self, a, b):
        if self.dtype == "fp32":
            super().hold_adapter(a, b)
