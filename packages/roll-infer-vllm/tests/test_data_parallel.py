"""Data-parallel ranks, which generate different sequences and share the experts, in two processes."""

from __future__ import annotations

import asyncio
import copy
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from itertools import count
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from vllm_live import CACHE, start
from vllm_mixtures import PROMPT, check_faults, mixture, remote_functions

from roll_core.errors import CorruptTensorError, EngineDiedError, ModelError, UnsupportedError
from roll_core.runtime.weights.publisher import verify
from roll_infer_vllm.sampling import sampling_params
from roll_infer_vllm.versions import has_data_parallel
from roll_testing.errors import raises_error
from roll_testing.infer.interrupting import until_interrupted
from shared_tests.engine_runs import BOUND, JUDGE, MIXTURE, finished_run, two_steps
from shared_tests.live_engine import biased, request
from shared_tests.loaded_engine import CLOSE, digests

pytestmark = pytest.mark.engine("vllm")
CONFIG = {**CACHE, "data_parallel_size": 2, "enable_expert_parallel": True}
RANKS = range(2)
LONG = [*range(2, 90)]
"""A prompt of more than two blocks of the cache."""
WAIT_S = 60.0
names = map("request {}".format, count())
NORM = "model.norm.weight"


def num_requests(worker):
    return len(worker.model_runner.requests)


def random_seed(worker):
    return torch.initial_seed()


def doubled_norm(rank):
    """A function that doubles a weight, of which every rank has a copy, on one rank."""

    def run(worker):
        if worker.parallel_config.data_parallel_rank == rank:
            worker.model_runner.get_model().get_parameter(NORM).data.mul_(2)

    return run


def change_last_process(worker):
    """Change an element of an expert on the last of tensor × data parallel ranks."""
    if (worker.parallel_config.data_parallel_rank, worker.rank) == (1, 1):
        weight = worker.model_runner.get_model().get_parameter("model.layers.1.mlp.experts.routed_experts.w2_weight")
        place = weight[-1].nonzero()[11].unbind()
        weight.data[-1][place] = torch.nextafter(weight[-1][place], weight[-1][place] + 1)


def generate_on(live, rank, prompt, **params):
    """Tokens and logprobs by one data-parallel rank."""
    from vllm.inputs import tokens_input

    async def generate():
        asked = request(next(names), prompt, **params)
        stream = live.strategy._engine.generate(
            tokens_input(list(prompt)), sampling_params(asked, 0, ()), asked.id, data_parallel_rank=rank
        )
        tokens, logprobs = [], []
        async for delta in stream:
            output = delta.outputs[0]
            tokens += output.token_ids
            logprobs += [output.logprobs[i][token].logprob for i, token in enumerate(output.token_ids)]
        return tokens, np.asarray(logprobs)

    return live.run(generate())


def check_greedy(model, prompt, tokens, logprobs):
    """They are the model's greedy tokens with its logprobs."""
    with torch.no_grad():
        rows = model(torch.as_tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
    expected = rows[torch.arange(len(tokens)), torch.as_tensor(tokens)].numpy()
    np.testing.assert_allclose(logprobs, expected, atol=CLOSE)
    np.testing.assert_allclose(expected, rows.max(dim=-1).values.numpy(), atol=CLOSE)


async def begun(live, num_tokens, num=2):
    """Requests, of which each has its first token."""
    asked = [request(next(names), [*PROMPT, 20 + i], temperature=0, max_new_tokens=num_tokens) for i in range(num)]
    tasks = [asyncio.create_task(live.strategy.generate(each)) for each in asked]
    while sum(len(each.outputs[0].token_ids) > 0 for each in await live.strategy.progress()) < len(asked):
        await asyncio.sleep(0.01)
    return asked, tasks


@pytest.fixture(scope="module")
def on_ranks():
    """`remote_functions`, if vLLM returns the results of all ranks."""
    import cloudpickle  # comes with vLLM

    if not has_data_parallel():
        pytest.skip("vLLM 0.31 returns the results of the first rank")

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield remote_functions(monkeypatch)


class TestTwoRanks:
    """One engine for all of them. All but the first are slow."""

    @pytest.fixture(scope="class")
    @classmethod
    def live(cls, on_ranks):
        engine = start(mixture("qwen3_moe"), CONFIG)
        yield engine
        engine.close()

    def test_both_ranks_compute_with_published_weights(self, live, on_ranks):
        for _ in range(2):
            live.step()
            manifest, receipt = live.publish()
            assert dict(receipt.digests) == digests(manifest)
            for rank in RANKS:
                check_greedy(live.model, PROMPT, *generate_on(live, rank, PROMPT, temperature=0, max_new_tokens=12))

    @pytest.mark.slow
    @pytest.mark.parametrize("num", [1, 2])
    def test_running_requests_continue_with_new_weights(self, live, num):
        """On one rank, while the other computes empty batches, and on both."""
        live.publish()

        async def through_a_publish():
            old, version = copy.deepcopy(live.model), live.version
            asked, tasks = await begun(live, 200, num)
            counts = await live.strategy._processes._call(num_requests)
            live.step()
            manifest, receipt = await live.update()
            outputs = [(await task).outputs[0] for task in tasks]
            return old, version, asked, counts, manifest, receipt, outputs

        def attempt():
            return live.run(through_a_publish())

        old, version, asked, counts, manifest, receipt, outputs = until_interrupted(
            attempt, lambda results: any(len(set(output.versions)) < 2 for output in results[-1])
        )
        assert sorted(counts) == [num - 1, 1]
        assert dict(receipt.digests) == digests(manifest)
        for each, output in zip(asked, outputs, strict=True):
            tokens, num_old = output.token_ids.tolist(), int((output.versions == version).sum())
            assert output.versions.tolist() == [version] * num_old + [version + 1] * (200 - num_old)
            assert 0 < num_old < 200
            check_greedy(old, each.prompt_ids, tokens[:num_old], output.logprobs[:num_old])
            check_greedy(live.model, [*each.prompt_ids, *tokens[:num_old]], tokens[num_old:], output.logprobs[num_old:])

    @pytest.mark.slow
    def test_requests_during_an_update_wait_for_it(self, live):
        """vLLM must not wake ranks that are paused."""
        live.publish()

        async def amid_an_update():
            engine = live.strategy._engine
            await engine.pause_generation(mode="keep", clear_cache=False)
            asked = [request(next(names), PROMPT, temperature=0) for _ in range(4)]
            tasks = [asyncio.create_task(live.strategy.generate(each)) for each in asked]
            await asyncio.sleep(0.2)
            live.step()
            manifest, receipt = await live.update()
            verify(manifest, receipt)
            return [(await task).outputs[0] for task in tasks]

        for output in live.run(amid_an_update()):
            assert set(output.versions) == {live.version}
            check_greedy(live.model, PROMPT, output.token_ids.tolist(), output.logprobs)

    @pytest.mark.slow
    def test_an_update_drops_cached_prefixes_of_both_ranks(self, live):
        live.publish()
        for rank in RANKS:
            generate_on(live, rank, LONG, temperature=0)
            live.strategy.metrics()
            generate_on(live, rank, LONG, temperature=0)
            assert live.strategy.metrics()["prefix_cache_hits"] == 64
        live.step()
        live.publish()
        for rank in RANKS:
            check_greedy(live.model, LONG, *generate_on(live, rank, LONG, temperature=0))
        assert live.strategy.metrics()["prefix_cache_hits"] == 0

    @pytest.mark.slow
    def test_seeded_tokens_do_not_depend_on_the_rank(self, live, on_ranks):
        live.publish()
        params = {"temperature": 1.0, "max_new_tokens": 30}
        tokens = {seed: [generate_on(live, rank, PROMPT, seed=seed, **params)[0] for rank in RANKS] for seed in (5, 6)}
        assert tokens[5][0] == tokens[5][1] != tokens[6][0] == tokens[6][1]
        assert len(set(on_ranks(live, random_seed))) == 2  # of tokens without a seed

    @pytest.mark.slow
    def test_metrics_are_of_both_ranks(self, live):
        live.publish()
        live.strategy.metrics()

        async def together():
            await asyncio.gather(*[live.strategy.generate(request(next(names), PROMPT)) for _ in range(4)])

        live.run(together())
        found = live.strategy.metrics()
        assert (found["prompt_tokens"], found["generated_tokens"]) == (4 * len(PROMPT), 4 * 8)
        assert 2 < found["running/max"] <= 4

    @pytest.mark.slow
    def test_requests_of_both_ranks_are_aborted(self, live):
        live.publish()

        async def aborted():
            asked, tasks = await begun(live, 240)
            found = await live.strategy.abort([each.id for each in asked])
            await asyncio.gather(*tasks)
            return [each.outputs[0] for each in found]

        outputs = until_interrupted(
            lambda: live.run(aborted()), lambda outputs: any(each.finish_reason != "abort" for each in outputs)
        )
        assert [each.finish_reason for each in outputs] == ["abort", "abort"]
        for rank in RANKS:
            check_greedy(live.model, PROMPT, *generate_on(live, rank, PROMPT, temperature=0))

    @pytest.mark.slow
    def test_the_endpoint_serves_both_ranks(self, live):
        live.publish()
        body = {"model": "actor_infer", "prompt": PROMPT, "max_tokens": 6, "temperature": 0, "logprobs": 1}
        body |= {"ignore_eos": True, "return_token_ids": True, "return_tokens_as_token_ids": True}

        async def together():
            return await asyncio.gather(*[asyncio.to_thread(live.ask, "completions", body) for _ in RANKS])

        for answer in live.run(together()):
            (choice,) = answer["choices"]
            check_greedy(live.model, PROMPT, choice["token_ids"], choice["logprobs"]["token_logprobs"])

    @pytest.mark.slow
    def test_both_ranks_sleep_and_wake(self, live):
        for _ in range(2):
            live.publish()
            live.run(live.strategy.sleep())
            with pytest.raises(RuntimeError):
                live.generate(next(names), PROMPT)
            live.run(live.strategy.wake())
            live.step()
            verify(*live.publish())
            for rank in RANKS:
                check_greedy(live.model, LONG, *generate_on(live, rank, LONG, temperature=0))

    @pytest.mark.slow
    def test_faults_of_one_rank_are_found(self, live, on_ranks):
        check_faults(live, on_ranks)
        for rank in RANKS:
            manifest, receipt = live.publish()
            verify(manifest, receipt)
            on_ranks(live, doubled_norm(rank))
            found = live.run(live.strategy._weights.digests(manifest))
            assert {key for key, each in digests(manifest).items() if found[key] != each} == {NORM}
        with raises_error(CorruptTensorError, NORM):
            verify(manifest, type(receipt)(version=receipt.version, digests=found, role=receipt.role))

    @pytest.mark.slow
    def test_the_engine_dies_with_one_rank(self, live):
        children = psutil.Process().children(recursive=True)
        (second,) = [each for each in children if "EngineCore_DP1" in " ".join(each.cmdline())]

        async def killed():
            _, tasks = await begun(live, 240)
            second.kill()
            return await asyncio.gather(*tasks, return_exceptions=True)

        results = live.run(killed())
        assert any(isinstance(each, EngineDiedError) for each in results)
        with pytest.raises(EngineDiedError):
            live.generate(next(names), PROMPT)


WORKER = """
    import sys, time
    sys.path.insert(0, {tests!r})
    import psutil
    from test_data_parallel import CONFIG
    from vllm_live import start
    from vllm_mixtures import mixture

    if __name__ == "__main__":
        live = start(mixture("qwen3_moe"), CONFIG)
        for each in psutil.Process().children(recursive=True):
            print("child", each.pid, *each.cmdline(), flush=True)
        print("ready", flush=True)
        time.sleep(600)
"""


@pytest.mark.usefixtures("on_ranks")
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["glm4_moe", "gpt_oss"])
def test_ranks_share_experts_of_other_architectures(kind):
    """Shared experts, dense layers and grouped routing; biases and sinks."""
    live = start(mixture(kind), CONFIG)
    try:
        for _ in range(2):
            live.step()
            verify(*live.publish())
            for rank in RANKS:
                check_greedy(live.model, PROMPT, *generate_on(live, rank, PROMPT, temperature=0))
    finally:
        live.close()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_experts_over_tensor_by_data_parallel_ranks(on_ranks):
    """Four processes. Each pair shares the heads; all four share the experts."""
    live = start(mixture("qwen3_moe"), {**CONFIG, "tensor_parallel_size": 2})
    try:
        for _ in range(2):
            live.step()
            manifest, receipt = live.publish()
            verify(manifest, receipt)
            for rank in RANKS:
                check_greedy(live.model, PROMPT, *generate_on(live, rank, PROMPT, temperature=0, max_new_tokens=12))
        on_ranks(live, change_last_process)
        found = live.run(live.strategy._weights.digests(manifest))
        wrong = {key for key, each in digests(manifest).items() if found[key] != each}
        assert wrong == {"model.layers.1.mlp.experts.down_proj"}
    finally:
        live.close()


@pytest.mark.usefixtures("on_ranks")
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_processes_exit_when_the_worker_is_killed(tmp_path):
    """Two ranks and vLLM's coordinator, which loads no plugins."""
    program = tmp_path / "worker.py"
    program.write_text(textwrap.dedent(WORKER).format(tests=str(Path(__file__).parent)), encoding="utf-8")
    children = {}
    with subprocess.Popen([sys.executable, str(program)], stdout=subprocess.PIPE, text=True) as worker:
        for line in worker.stdout:
            if line.startswith("child "):
                _, pid, title = line.split(maxsplit=2)
                children[int(pid)] = title
            if line == "ready\n":
                break
        worker.kill()
    titles = " ".join(children.values())
    assert all(name in titles for name in ("EngineCore_DP0", "EngineCore_DP1", "DPCoordinator"))
    until = time.monotonic() + WAIT_S
    while (left := [pid for pid in children if psutil.pid_exists(pid)]) and time.monotonic() < until:
        time.sleep(0.1)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not [children[pid] for pid in left]


@pytest.mark.usefixtures("on_ranks")
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_trains_beside_two_ranks(tmp_path):
    """`roll-core run`: the trainer has one of the engine's slots, and they take turns."""
    config = two_steps(tmp_path, "vllm", {**CONFIG, "kv_cache_memory_bytes": 32 << 20})
    config |= {"executor": "local"}
    config["actor_train"]["model_args"]["random_init"] = MIXTURE
    config["actor_infer"]["device_mapping"] = [0, 1]
    config["guards"] = {"logprob_probe": {"every": 1}, "logprob_gap": {"action": "error", "threshold": BOUND}}
    _, lines = finished_run(tmp_path, "judges", JUDGE, config)
    assert [line["weight_sync/version"] for line in lines] == [0, 1]
    for line in lines:
        assert line["weight_sync/logprob_probe"] < BOUND
        assert line["actor/logprob_gap"] < BOUND
        assert line["actor/grad_norm"] > 0


def test_a_dense_model_is_refused_at_the_start():
    with raises_error(ModelError, "actor_infer rank 0", "data_parallel_size", "qwen2", "device_mapping"):
        start(biased(), CONFIG)


def test_a_vllm_without_results_of_all_ranks_is_refused(monkeypatch):
    from vllm.v1.engine.core_client import AsyncMPClient

    monkeypatch.delattr(AsyncMPClient, "call_utility_all_async", raising=False)  # as in 0.31
    with raises_error(UnsupportedError, "actor_infer rank 0", "data_parallel_size", "0.32"):
        start(mixture("qwen3_moe"), CONFIG)


# -- mends -------------------------------------------------------------------------------------------------------------


def test_experts_of_other_ranks_are_skipped():
    """The sum over ranks is what one rank with all experts computes."""
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts, cpu_prepack_moe_weight

    from roll_infer_vllm.workarounds import skip_experts_of_other_ranks

    skip_experts_of_other_ranks()
    generator = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(shape, generator=generator)

    class Experts(CPUUnquantizedExperts):
        w1_bias = w2_bias = None

        def __init__(self):
            self._use_zentorch = False

    w13_EOH, w2_EHI, x_TH = randn(4, 64, 32), randn(4, 32, 32), randn(6, 32)

    def computed(mine, ids_TK, weights_TK, on_input):
        expert_map = None
        if len(mine) < 4:
            expert_map = torch.full((4,), -1, dtype=torch.int32)
            expert_map[mine] = torch.arange(len(mine), dtype=torch.int32)
        output_TH = torch.empty_like(x_TH)
        Experts().apply(
            output=output_TH,
            hidden_states=x_TH,
            w1=cpu_prepack_moe_weight(w13_EOH[mine], "vec"),
            w2=cpu_prepack_moe_weight(w2_EHI[mine], "vec"),
            topk_weights=weights_TK,
            topk_ids=ids_TK,
            activation=MoEActivation.SILU,
            global_num_experts=4,
            expert_map=expert_map,
            a1q_scale=None,
            a2_scale=None,
            workspace13=None,
            workspace2=None,
            expert_tokens_meta=None,
            apply_router_weight_on_input=on_input,
        )
        return output_TH

    for num, on_input in ((2, False), (1, True)):
        ids_TK = torch.stack([torch.randperm(4, generator=generator)[:num] for _ in x_TH]).int()
        weights_TK = torch.rand(len(x_TH), num, generator=generator)
        whole = computed([0, 1, 2, 3], ids_TK, weights_TK, on_input)
        parts = [computed(mine, ids_TK, weights_TK, on_input) for mine in ([1, 2], [3, 0])]
        torch.testing.assert_close(parts[0] + parts[1], whole)
        assert all(part.abs().sum() > 0 for part in parts)


def test_vllm_still_lacks_operations_of_uneven_parts_on_a_cpu():
    """When this fails, `workarounds.exchange_uneven_parts` is no longer needed."""
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    from roll_infer_vllm.workarounds import exchange_uneven_parts

    exchange_uneven_parts()
    for operation in (CpuCommunicator.all_gatherv, CpuCommunicator.reduce_scatterv):
        assert operation.__module__ == "roll_infer_vllm.workarounds"


def test_uneven_parts_are_gathered_and_scattered():
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    from roll_infer_vllm.workarounds import exchange_uneven_parts

    exchange_uneven_parts()
    sizes, barrier, sent, results = [3, 0, 2], threading.Barrier(3), {}, {}

    class Rank(CpuCommunicator):
        """One thread of a group, with the operations that vLLM has."""

        def __init__(self, rank):
            self.rank_in_group, self.world_size = rank, 3

        def _exchanged(self, tensor):
            barrier.wait(WAIT_S)
            sent[self.rank_in_group] = tensor.clone()
            barrier.wait(WAIT_S)
            return [sent[rank] for rank in range(3)]

        def all_gather(self, tensor, dim=-1):
            return torch.cat(self._exchanged(tensor), dim)

        def all_reduce(self, tensor):
            return sum(self._exchanged(tensor))

    rows, ids = torch.arange(10.0).view(5, 2), torch.arange(5)
    split = [tensor.split(sizes) for tensor in (rows, ids)]

    def run(rank):
        group = Rank(rank)
        gathered = group.all_gatherv([split[0][rank], split[1][rank]], 0, sizes)
        results[rank] = gathered, group.reduce_scatterv(rows * (rank + 1), 0, sizes)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank, (gathered, scattered) in results.items():
        assert torch.equal(gathered[0], rows)
        assert torch.equal(gathered[1], ids)
        assert torch.equal(scattered, 6 * split[0][rank])
    assert len(results) == 3
    with pytest.raises(NotImplementedError):
        Rank(0).all_gatherv(rows, 1, sizes)
