"""From the workers of vLLM and SGLang into these engines' processes, for which the tests themselves stand in."""

import asyncio
import base64
import json
import logging
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from sync_workers import HostMemory

from roll_core.errors import MissingTensorError
from roll_core.spec.weights import make_manifest
from roll_modeling.engine_weights import ModelWeights
from roll_testing.errors import mentions, raises_error
from roll_weight_transports import device_memory
from roll_weight_transports.buckets import BucketInfo, Incoming, opening_failure, read_bucket

TENSORS = {"a": torch.arange(60.0), "b": torch.randn(7, 9).bfloat16(), "none": torch.zeros(0, 4), "c": torch.ones(50)}
MANIFEST = make_manifest(1, TENSORS.items())


class EngineProcess:
    """An engine process."""

    def __init__(self):
        self.device, self.loaded, self.ways = "cpu", {}, set()

    def load(self, bucket):
        info = BucketInfo(**json.loads(json.dumps(bucket)))
        self.ways.add("device" if info.handles else "host")
        self.loaded.update(read_bucket(info, self.device))

    def open(self, bucket):
        return opening_failure(BucketInfo(**bucket), self.device)


async def into_vllm(process, tensors, monkeypatch):
    VllmProcesses = pytest.importorskip("roll_infer_vllm.processes").VllmProcesses
    for name in ("vllm", "vllm.distributed", "vllm.distributed.weight_transfer"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(__path__=[]))
    base = SimpleNamespace(WeightTransferUpdateRequest=lambda bucket: bucket)
    monkeypatch.setitem(sys.modules, "vllm.distributed.weight_transfer.base", base)
    steps = []

    class Engine:
        async def start_weight_update(self):
            steps.append("start")

        async def update_weights(self, bucket):
            process.load(bucket)

        async def finish_weight_update(self):
            steps.append("finish")

        async def collective_rpc(self, method, args=()):
            if method == "roll_load_failure":
                return [""]
            action, bucket = args
            assert (method, action) == ("roll_act", "open")
            return [process.open(bucket)]

    who = "actor_infer rank 0"
    weights = ModelWeights(VllmProcesses(Engine(), who), 256, ("cpu",))
    try:
        await weights.load(Incoming(who, MANIFEST, iter(tensors.items())))
    finally:
        assert steps == ["start", "finish"]
        left = weights.writer._memory
        weights.close()
    return left


async def into_sglang(process, tensors, monkeypatch):
    processes = pytest.importorskip("roll_infer_sglang.processes")
    monkeypatch.setattr(processes, "has_update_sessions", lambda: True)
    sessions = []

    class Server:
        async def request(self, path, body):
            if path.endswith("_weight_update"):
                sessions.append(path)
                return
            ((message, _),) = pickle.loads(base64.b64decode(body["serialized_named_tensors"][0]))
            message = json.loads(message)
            done = {"load": process.load, "open": process.open}[message["action"]](message["argument"])
            (Path(message["results"]) / "0").write_text(json.dumps({"done": done}))

    who = "actor_infer rank 0"
    weights = ModelWeights(processes.SglangProcesses(Server(), who, 1), 256, ("cpu",))
    try:
        await weights.load(Incoming(who, MANIFEST, iter(tensors.items())))
    finally:
        assert sessions == ["/begin_weight_update", "/end_weight_update"]
        left = weights.writer._memory
        weights.close()
    return left


WAYS = pytest.mark.parametrize("way", [into_vllm, into_sglang])


@WAYS
def test_host_tensors_are_loaded_through_the_host(way, monkeypatch):
    process = EngineProcess()
    asyncio.run(way(process, TENSORS, monkeypatch))
    assert process.ways == {"host"}
    assert all(torch.equal(process.loaded[name], TENSORS[name]) for name in TENSORS)


@WAYS
def test_device_tensors_stay_on_the_device_and_are_freed(way, monkeypatch):
    monkeypatch.setitem(device_memory.KINDS, "cpu", HostMemory())
    process = EngineProcess()
    left = asyncio.run(way(process, TENSORS, monkeypatch))
    assert process.ways == {"device"}
    assert all(torch.equal(process.loaded[name], TENSORS[name]) for name in TENSORS)
    assert left is None


@WAYS
def test_unopenable_device_memory_warns_and_uses_the_host(way, monkeypatch, caplog):
    caplog.set_level(logging.WARNING)
    monkeypatch.setitem(device_memory.KINDS, "cpu", kind := HostMemory())
    kind.refuses = "peer access is not supported"
    process = EngineProcess()
    asyncio.run(way(process, TENSORS, monkeypatch))
    assert process.ways == {"host"}
    assert all(torch.equal(process.loaded[name], TENSORS[name]) for name in TENSORS)
    assert mentions(caplog.text, "RuntimeError")


@WAYS
def test_missing_tensor_is_named_and_device_memory_freed(way, monkeypatch):
    monkeypatch.setitem(device_memory.KINDS, "cpu", HostMemory())
    with raises_error(MissingTensorError, "version 1"):
        asyncio.run(way(EngineProcess(), {name: TENSORS[name] for name in ("a", "b", "none")}, monkeypatch))
