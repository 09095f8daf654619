"""One replica over two nodes, here two processes of one host that share nothing but the network."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import psutil
import pytest
from vllm_live import CACHE, strategy

from roll_core.host import free_port
from roll_core.spec.model import MeshInfo, ReplicaPart
from roll_infer_vllm.config import VllmConfig
from shared_tests.engine_runs import BOUND, MODEL, finished_run, two_steps
from shared_tests.live_engine import Live, biased
from shared_tests.loaded_engine import CLOSE, PROMPT, digests

pytestmark = [pytest.mark.slow, pytest.mark.engine("vllm"), pytest.mark.timeout(900)]

FOLLOWER = """
    import asyncio
    import sys

    sys.path.insert(0, {tests!r})
    from test_several_nodes import CONFIG, SPEC, mesh

    from roll_core.errors import EngineDiedError
    from roll_infer_vllm.config import VllmConfig
    from roll_infer_vllm.follower import VllmFollower


    async def main():
        follower = VllmFollower(VllmConfig.model_validate({{**CONFIG, {key!r}: 2}}))
        await follower.start(SPEC, mesh(1, int(sys.argv[1])))
        print("ready", flush=True)
        loop = asyncio.get_running_loop()
        ended = loop.run_in_executor(None, sys.stdin.read)
        while not ended.done():
            await asyncio.sleep(0.1)
            try:
                await follower.check()
            except EngineDiedError:
                print("EngineDiedError", flush=True)
                break
        await follower.stop()


    if __name__ == "__main__":
        asyncio.run(main())
"""
WAIT_S = 60.0
CONFIG = {**CACHE, "bucket_mib": 1}
SPEC = biased(num_key_value_heads=2)


def mesh(node_rank, port):
    part = ReplicaPart(
        node_rank=node_rank,
        num_nodes=2,
        master_addr="127.0.0.1",
        master_port=port,
        address="127.0.0.1",
        sampling_seed=7,
    )
    return MeshInfo(role="actor_infer", num_threads=1, part=part, sampling_seed=7)


class OnTwoNodes(Live):
    """The engine's first part in this process, and its follower in another one."""

    def __init__(self, key, folder):
        self.port, program = free_port(), folder / "follower.py"
        program.write_text(textwrap.dedent(FOLLOWER).format(tests=str(Path(__file__).parent), key=key))
        command = [sys.executable, str(program), str(self.port)]
        self.follower = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        super().__init__(strategy(VllmConfig.model_validate({**CONFIG, key: 2})), SPEC)

    def start(self, strategy, num_slots=1):
        self._runner.run(strategy.start(self.spec, mesh(0, self.port)))

    def close(self):
        self.follower.stdin.close()
        super().close()
        self.follower.wait(WAIT_S)
        self.follower.stdout.close()


@pytest.fixture(params=["tensor_parallel_size", "pipeline_parallel_size"])
def live(request, tmp_path):
    engine = OnTwoNodes(request.param, tmp_path)
    yield engine
    engine.close()


def test_parts_load_the_published_weights_and_compute(live):
    """Buckets come as bytes; each part proves its share of the weights."""
    for _ in range(2):
        live.step()
        manifest, receipt = live.publish()
        assert dict(receipt.digests) == digests(manifest)
        output = live.generate(f"version {live.version}", PROMPT).outputs[0]
        expected = live.logprobs([*PROMPT, *output.token_ids], len(PROMPT))
        np.testing.assert_allclose(output.logprobs, expected, atol=CLOSE)
    check_exit(live)


def check_exit(live):
    """A follower reports the exit of its process. The first pipeline stage would block, so a run ends all parts."""
    follower = psutil.Process(live.follower.pid)
    (worker,) = [each for each in follower.children(recursive=True) if "VLLM::Worker" in " ".join(each.cmdline())]
    worker.kill()
    assert "EngineDiedError\n" in live.follower.stdout


@pytest.fixture
def two_nodes(monkeypatch):
    """The address of a Ray cluster of two nodes on this host."""
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 2, "object_store_memory": 100 * 1024**2, "include_dashboard": False}
    for name, value in {"RAY_USAGE_STATS_ENABLED": "0", "RAY_enable_worker_prestart": "0"}.items():
        monkeypatch.setenv(name, value)
    cluster = Cluster(initialize_head=True, head_node_args=node)
    cluster.add_node(num_cpus=2, object_store_memory=100 * 1024**2)
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    yield
    cluster.shutdown()


KILLING = """
import contextlib
import os
import psutil

def score(prompt, response, **row):
    try:
        os.close(os.open({flag!r}, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        pass
    else:
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.name() == "VLLM::Worker_TP1" and process.environ().get("ROLL_TEST") == {flag!r}:
                    process.kill()
    return sum(c in "02468" for c in response) / 6 + len(response) % 2
"""


@pytest.mark.ray
@pytest.mark.usefixtures("two_nodes")
def test_a_run_trains_with_a_replica_over_two_nodes(tmp_path):
    """`roll-core run`; a process of the second node is killed after the first group, and both parts start again."""
    flag = tmp_path / "killed"
    config = two_steps(tmp_path, "vllm", {**CACHE, "tensor_parallel_size": 2})
    config["num_gpus_per_node"] = 1
    config["actor_train"]["model_args"]["random_init"] = {**MODEL, "num_key_value_heads": 2}
    config["actor_infer"]["device_mapping"] = [0, 1]
    config["actor_infer"]["system_envs"] = {"ROLL_TEST": str(flag)}
    config["max_steps"] = 3
    config["guards"] = {"logprob_probe": {"every": 1}, "logprob_gap": {"action": "error", "threshold": BOUND}}
    _, lines = finished_run(tmp_path, "judges", KILLING.format(flag=str(flag)), config)
    assert [line["weight_sync/version"] for line in lines] == [0, 1, 2]
    assert lines[-1]["rollout/lost_replicas"] == 1
    for line in lines:
        assert line["weight_sync/logprob_probe"] < BOUND
        assert line["actor/logprob_gap"] < BOUND
        assert line["actor/grad_norm"] > 0
