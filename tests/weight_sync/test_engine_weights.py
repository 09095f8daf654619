"""Weight updates of an engine in its own processes: what the worker sends, and what a process reads back."""

import asyncio
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from roll_core.errors import CorruptTensorError, MissingTensorError, UnexpectedTensorError, WeightSyncError
from roll_core.spec.model import LoraSpec
from roll_core.spec.multilinear import MULTILINEAR
from roll_core.spec.weights import digest, make_manifest
from roll_modeling.engine_weights import (
    AdapterWeights,
    EngineProcesses,
    FusedTensor,
    LoadedModel,
    LoadedTensor,
    ModelWeights,
)
from roll_testing.errors import raises_error
from roll_weight_transports.buckets import BucketInfo, Incoming

LORA = LoraSpec(targets=("q",), rank=1, alpha=1.0)
WHO = "actor_infer rank 0"
A, B = "layers.0.q.lora_A.weight", "layers.0.q.lora_B.weight"


class Location(NamedTuple):
    keys: tuple[str]
    shape: tuple[int, ...]


class Process(LoadedModel):
    """A process that has the tensors of `names`; all processes know every name of the model."""

    device, dtype = "cpu", torch.float32

    def __init__(self, rank, names):
        self.rank = rank
        self.tensors = {name: torch.zeros(3, 2) for name in names}
        self.buffers = {A: torch.zeros(4, 2), B: torch.zeros(3, 4)}

    def locate(self, name):
        if name not in ("a", "b"):
            raise KeyError(name)
        return Location((name,), (3, 2)) if name in self.tensors else None

    def located(self):
        return [(name, Location((name,), (3, 2))) for name in self.tensors]

    def read(self, name, at):
        return self.tensors[name]

    def load(self, tensors):
        for name, each in tensors:
            if name in self.tensors:
                self.tensors[name] = each

    def adapter_buffer(self, name):
        return self.buffers[name]

    def required(self, names):
        if names and B not in names:
            yield B, [3, 1]


class Processes(EngineProcesses):
    engine, who = "Fake", WHO

    def __init__(self, *processes):
        self.processes, self.versions, self.steps, self.loaded = processes, [], [], None

    async def act(self, action, argument, *, version=None):
        self.versions += [] if version is None else [version]
        return [each.act(action, argument) for each in self.processes]

    async def begin_update(self):
        self.steps.append("begin")

    async def finish_update(self):
        self.steps.append("finish")

    async def load_adapter(self, name, folder):
        from safetensors.torch import load_file

        self.loaded = name, load_file(folder / "adapter_model.safetensors")


def model(rank=0, names=("a", "b")):
    return Process(rank, names)


def update(weights, sent, manifest=None):
    async def act():
        right = manifest or make_manifest(3, sent.items())
        await weights.compare(right)
        await weights.load(Incoming(WHO, right, iter(sent.items())))
        return await weights.digests(right)

    try:
        return asyncio.run(act())
    finally:
        weights.close()


SENT = {"a": torch.arange(6.0).view(3, 2), "b": torch.randn(3, 2)}


def test_every_process_loads_and_digests_its_own_weights():
    # Two pipeline stages, the second with two tensor-parallel ranks, of which rank 0 returns digests.
    processes = Processes(model(0, ("a",)), model(0, ("b",)), model(1, ("b",)))
    found = update(ModelWeights(processes, 24, ()), SENT)
    assert found == {name: digest(each) for name, each in SENT.items()}
    assert torch.equal(processes.processes[2].tensors["b"], SENT["b"])
    assert (processes.steps, processes.versions) == (["begin", "finish"], [3])
    manifest = make_manifest(4, SENT.items(), MULTILINEAR)
    found = asyncio.run(ModelWeights(processes, 24, ()).digests(manifest))
    assert found == {entry.name: entry.digest for entry in manifest.tensors}


@pytest.mark.parametrize("rank", [0, 1])
def test_wrong_copy_of_a_tensor_shows_in_the_digests(rank):
    """Two data-parallel ranks, each with a copy of every tensor."""
    processes = Processes(model(), model())
    update(ModelWeights(processes, 24, ()), SENT)
    processes.processes[rank].tensors["b"] = changed = SENT["b"] + 1
    found = asyncio.run(ModelWeights(processes, 24, ()).digests(make_manifest(4, SENT.items())))
    assert found == {"a": digest(SENT["a"]), "b": digest(changed)}


@pytest.mark.parametrize(
    ("sent", "error", "name"),
    [
        ({"a": SENT["a"]}, MissingTensorError, "b"),
        (SENT | {"c": SENT["a"]}, UnexpectedTensorError, "c"),
        (SENT | {"b": torch.zeros(2, 2)}, CorruptTensorError, "b"),
    ],
)
def test_manifest_of_another_model_is_rejected_before_loading(sent, error, name):
    processes = Processes(model())
    with raises_error(error, WHO, name):
        update(ModelWeights(processes, 24, ()), sent)
    assert processes.steps == []
    assert not processes.processes[0].tensors["a"].any()


class Half(LoadedTensor):
    shape = (3, 2)


class FusedProcess(Process):
    """A process whose engine fuses `gate` and `up` in one parameter."""

    def __init__(self):
        super().__init__(0, ())
        self.module = SimpleNamespace(weight=torch.zeros(6, 2))
        halves = [Half(module=self.module, parameter="weight", index=index) for index in range(2)]
        self.locations = dict(zip(("gate", "up"), halves, strict=True))
        self.locations["gate_up"] = FusedTensor(module=self.module, parameter="weight", members=tuple(halves))

    def locate(self, name):
        return self.locations[name]

    def located(self):
        return [(name, self.locations[name]) for name in ("gate", "up")]

    def rows(self, at):
        halves = self.module.weight.split(3)
        return halves if isinstance(at, FusedTensor) else halves[at.index : at.index + 1]

    def read(self, name, at):
        return torch.cat(self.rows(at))

    def load(self, tensors):
        for name, tensor in tensors:
            for row, sent in zip(self.rows(self.locate(name)), tensor.split(3), strict=True):
                row.copy_(sent)


GATE, UP = torch.randn(3, 2), torch.randn(3, 2)


@pytest.mark.parametrize("sent", [{"gate": GATE, "up": UP}, {"gate_up": torch.cat([GATE, UP])}], ids=len)
def test_a_fused_parameter_is_sent_in_parts_or_as_one_tensor(sent):
    processes = Processes(FusedProcess())
    assert update(ModelWeights(processes, 100, ()), sent) == {name: digest(tensor) for name, tensor in sent.items()}
    assert torch.equal(processes.processes[0].module.weight, torch.cat([GATE, UP]))


@pytest.mark.parametrize(
    ("sent", "error", "name"),
    [
        ({"gate": GATE}, MissingTensorError, "up"),
        ({"gate_up": torch.zeros(5, 2)}, CorruptTensorError, "gate_up"),
    ],
)
def test_a_fused_parameter_is_rejected_unless_it_is_complete(sent, error, name):
    with raises_error(error, WHO, name):
        update(ModelWeights(Processes(FusedProcess()), 100, ()), sent)


def test_an_update_that_fails_is_finished_too():
    processes = Processes(model())
    with raises_error(MissingTensorError, "b"):
        update(ModelWeights(processes, 24, ()), {"a": SENT["a"]}, make_manifest(3, SENT.items()))
    assert processes.steps == ["begin", "finish"]


def test_adapter_is_written_and_read_back_without_padding():
    sent = {A: torch.randn(1, 2), B: torch.randn(3, 1)}
    processes = Processes(model())
    processes.processes[0].buffers[A][:1], processes.processes[0].buffers[B][:, :1] = sent[A], sent[B]
    found = update(AdapterWeights(processes, "actor_infer", LORA), sent)
    assert found == {name: digest(each) for name, each in sent.items()}
    name, tensors = processes.loaded
    assert name == "actor_infer"
    assert {each.removeprefix("base_model.model.") for each in tensors} == {A, B}


@pytest.mark.parametrize(
    ("sent", "error"),
    [
        ({A: torch.zeros(1, 2)}, MissingTensorError),
        ({A: torch.zeros(2, 2), B: torch.zeros(3, 2)}, CorruptTensorError),
        ({A: torch.zeros(1, 5), B: torch.zeros(3, 1)}, CorruptTensorError),
        ({"layers.0.k.lora_A.weight": torch.zeros(1, 2)}, WeightSyncError),
    ],
)
def test_an_adapter_that_does_not_fit_is_rejected(sent, error):
    processes = Processes(model())
    processes.processes[0].required = lambda names: ()
    with raises_error(error, WHO):
        update(AdapterWeights(processes, "actor_infer", LORA), sent)
    assert processes.loaded is None


def test_process_reports_why_it_cannot_open_a_bucket():
    info = BucketInfo(num_bytes=1, tensors=(), path="/no/such/memory")
    assert "FileNotFoundError" in model().act("open", info.plain())
