"""What the conformance kit does not ask, because it is SGLang's own: on the real engine, where it is installed."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
from sglang_on_a_cpu import ON_A_CPU, stood_in

from roll_core.errors import ConfigError
from roll_infer_sglang.config import SglangConfig
from roll_testing.errors import raises_error
from roll_testing.infer.interrupting import until_interrupted, was_whole
from shared_tests.continuing import check_that_it_goes_on
from shared_tests.live_engine import Live, biased, request
from shared_tests.loaded_engine import TOKEN_BYTES, LoadedEngineTests, check_in_fp16

pytestmark = pytest.mark.engine("sglang")

CACHE_BYTES = 4 << 20
CONFIG = ON_A_CPU | {"max_total_tokens": CACHE_BYTES // TOKEN_BYTES, "max_running_requests": 128, "bucket_mib": 1}


def strategy():
    from roll_infer_sglang.strategy import SglangStrategy

    return SglangStrategy(SglangConfig.model_validate(CONFIG))


class TestEngine(LoadedEngineTests):
    """One engine for all of them: starting one takes 30 s of CPU time."""

    cache_bytes = CACHE_BYTES

    @pytest.fixture(scope="class")
    @classmethod
    def live(cls):
        with stood_in():  # set before each test's own
            engine = Live(strategy(), biased())
            yield engine
            engine.close()

    def test_a_seeded_request_draws_the_same_tokens_over_an_update(self, live):
        """Its tokens depend on their place in the sequence, not on how often it was interrupted."""
        live.publish()
        asked = {"max_new_tokens": 200, "seed": 5}
        whole = live.generate("whole", [5, 6, 7], **asked).outputs[0]

        async def update_meanwhile():
            running = asyncio.create_task(live.strategy.generate(request("cut", [5, 6, 7], **asked)))
            await live.strategy.generate(request("short", [5], max_new_tokens=6))
            await live.update()
            return await running

        found = until_interrupted(
            lambda: live.run(update_meanwhile()), lambda each: was_whole(each, 200, live.version - 1)
        )
        cut = found.outputs[0]
        assert len(set(cut.versions)) == 2
        assert cut.token_ids.tolist() == whole.token_ids.tolist()

    def test_logprobs_of_masked_ends_are_the_models_own(self, live):
        ends = tuple(range(2, 60))
        asked = {
            "min_new_tokens": 6,
            "max_new_tokens": 6,
            "ignore_eos": False,
            "stop_token_ids": ends,
            "temperature": 0.7,
        }
        live.publish()
        prompt = [5, 6, 7]
        output = live.generate("masked", prompt, seed=1, **asked).outputs[0]
        assert len(output.token_ids) == 6
        assert not set(output.token_ids.tolist()) & set(ends)
        right = live.logprobs([*prompt, *output.token_ids], len(prompt), temperature=0.7)
        np.testing.assert_allclose(output.logprobs, right, atol=1e-4)

    def test_requests_of_several_priorities_run_side_by_side(self, live):
        async def both():
            asked = [request(f"p{priority}", [4, 5], priority=priority) for priority in (3, 0, 3)]
            asked = [each if at < 2 else request("p", [4, 5]) for at, each in enumerate(asked)]
            return await asyncio.gather(*[live.strategy.generate(each) for each in asked])

        assert [len(each.outputs[0].token_ids) for each in live.run(both())] == [8, 8, 8]

    def test_the_urgent_are_served_first_where_not_all_can_be(self, live):
        rows = CONFIG["max_running_requests"]
        # With the second batch at the latest. On a busy host the others may end before it is even submitted.
        assert any(live.place_of_the_urgent(3 * rows) < 2 * rows for _ in range(3))

    def test_only_the_worker_may_call_control_endpoints(self, live):
        """Among which its key is."""
        changing = ("update_weights_from_tensor", "load_lora_adapter_from_tensors", "abort_request", "pause_generation")
        telling = ("server_info", "get_server_info", "openapi.json")
        asked = [(f"/{path}", {"abort_all": True}) for path in changing] + [(f"/{path}",) for path in telling]
        assert [status for status, _ in refusals(live, *asked)] == [401] * len(asked)

    def test_code_that_comes_with_a_request_is_not_run(self, live, tmp_path):
        """A logit processor is a pickle; here of a call that would leave a file."""
        import dill

        class Touch:
            def __reduce__(self):
                return Path.touch, (tmp_path / "touched",)

        body = {
            "input_ids": [5, 6, 7],
            "sampling_params": {"max_new_tokens": 4},
            "custom_logit_processor": json.dumps({"callable": dill.dumps(Touch()).hex()}),
        }
        ((status, said),) = refusals(live, ("/generate", body))
        assert (status, "custom_logit_processor" in said) == (400, True)
        assert not (tmp_path / "touched").exists()
        assert len(live.generate("after", [5, 6, 7], seed=1).outputs[0].token_ids) == 8  # with ours

    def test_a_router_needs_no_key_for_what_it_asks(self, live):
        """Whether the server lives, what it serves, and generation by token ids."""
        live.publish()
        url = live.strategy.endpoint().removesuffix("/v1")

        def ask(path, body=None):
            data = None if body is None else json.dumps(body).encode()
            sent = urllib.request.Request(f"{url}{path}", data, {"Content-Type": "application/json"})
            with urllib.request.urlopen(sent, timeout=60) as answer:
                assert answer.status == 200
                return json.loads(answer.read() or b"{}")

        body = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}

        async def asked():
            calls = (("/health",), ("/model_info",), ("/v1/models",), ("/generate", body))
            return [await asyncio.to_thread(ask, *each) for each in calls]

        _, info, models, generated = live.run(asked())
        assert (info["served_model_name"], info["weight_version"]) == ("actor_infer", str(live.version))
        assert [each["id"] for each in models["data"]] == ["actor_infer"]
        assert len(generated["output_ids"]) == 4

    def test_foreign_requests_end_at_a_publish_with_partial_output(self, live):
        """What this engine is asked by its worker goes on: SGLang drops its cache only when nothing runs."""
        server = live.strategy._server

        def ask():
            body = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 240, "ignore_eos": True}}
            headers = {"Content-Type": "application/json"}
            with urllib.request.urlopen(
                urllib.request.Request(f"{server.url}/generate", json.dumps(body).encode(), headers), timeout=60
            ) as answer:
                return json.load(answer)

        async def publish_meanwhile():
            asking = asyncio.create_task(asyncio.to_thread(ask))
            own = asyncio.create_task(live.strategy.generate(request("own", [5, 6, 7], max_new_tokens=200)))
            while not (own.done() or asking.done()):
                if (await server.request("/v1/loads?include=core"))["loads"][0]["num_running_reqs"] == 2:
                    await live.update()
                    break
                await asyncio.sleep(0.01)
            return await own, await asking

        own, ended = until_interrupted(
            lambda: live.run(publish_meanwhile()),
            lambda each: each[1]["meta_info"]["finish_reason"]["type"] == "length",
        )
        assert len(own.outputs[0].token_ids) == 200
        assert ended["meta_info"]["finish_reason"]["type"] == "abort"
        assert 0 < len(ended["output_ids"]) < 240

    def test_a_cancelled_request_ends_in_the_engine(self, live):
        """It had some 230 tokens to go, more than the one that is drawn then."""
        live.publish()

        async def cancel():
            cancelled = asyncio.create_task(live.strategy.generate(request("cancelled", [5, 6, 7], max_new_tokens=240)))
            await live.strategy.generate(request("short", [5], max_new_tokens=6))
            cancelled.cancel()
            await asyncio.gather(cancelled, return_exceptions=True)
            return await num_beside(live, "beside")

        assert live.run(cancel()) <= 1

    def test_requests_resume_after_a_pause_unless_cancelled(self, live):
        """SGLang would forget the abort of one that waits for the end of a pause."""
        live.publish()

        async def cancel():
            await live.strategy._server.request("/pause_generation", {"mode": "abort"})
            asked = [request(f"behind-{num}", [5, 6, 7], max_new_tokens=num) for num in (240, 20)]
            calls = [live.strategy.generate(each) for each in asked]
            cancelled, other = map(asyncio.create_task, calls)
            await asyncio.sleep(0.3)  # to reach SGLang
            cancelled.cancel()
            await asyncio.gather(cancelled, return_exceptions=True)
            await asyncio.sleep(0.3)
            await live.update()
            output = (await other).outputs[0]
            return output, await num_beside(live, "beside")

        output, beside = live.run(cancel())
        assert output.versions.tolist() == [live.version] * 20
        assert beside <= 1

    def test_closed_server_connection_is_not_reused(self, live):
        """SGLang closes what idles for 5 s; a loop that has not turned since then does not know."""
        live.run(live.strategy._server.request("/pause_generation", {"mode": "abort"}))
        time.sleep(6)
        live._runner.run(live.strategy._server.request("/continue_generation", {}))
        assert len(live.generate("after", [5, 6, 7], max_new_tokens=3).outputs[0].token_ids) == 3

    def test_responses_of_a_killed_engine_resume_elsewhere(self, live):
        live.publish()
        dying = strategy()
        processes = []

        async def die():
            processes.extend(psutil.Process(each) for each in dying._server.processes())
            assert len(processes) >= 3
            for each in processes:
                each.kill()

        try:
            live.start(dying)
            check_that_it_goes_on(live, dying, dying._server.processes(), die)
        finally:
            live.run(dying.stop())
        _, alive = psutil.wait_procs(processes, timeout=60)
        assert not alive


def refusal(live, path, body=None):
    """How the server answers whoever has no key: status and text."""
    asked = urllib.request.Request(
        live.strategy.endpoint().removesuffix("/v1") + path,
        data=None if body is None else json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(asked, timeout=30)
    with caught.value as answer:
        return answer.code, answer.read().decode()


def refusals(live, *asked):
    async def attempts():
        return [await asyncio.to_thread(refusal, live, *each) for each in asked]

    return live.run(attempts())


async def num_beside(live, name):
    """How many requests SGLang draws when it has drawn most of one of 200 tokens."""

    async def num_drawn():
        return sum(len(each.outputs[0].token_ids) for each in await live.strategy.progress() if each.id == name)

    drawing = asyncio.create_task(live.strategy.generate(request(name, [5, 6, 7], max_new_tokens=200)))
    found = 0
    while await num_drawn() < 180 and not drawing.done():
        found = (await live.strategy._server.request("/v1/loads?include=core"))["loads"][0]["num_running_reqs"]
    await drawing
    return found


def test_the_arguments_that_check_knows_are_the_engines_own(monkeypatch):
    """An argument that the installed engine lacks is named, with the nearest that it has. Other releases have
    others."""
    from roll_infer_sglang import server
    from roll_infer_sglang.arguments import PASSED_ON, REJECTED

    own, check = set(), server.check_arguments
    monkeypatch.setattr(
        server, "check_arguments", lambda engine, given, known: own.update(known) or check(engine, given, known)
    )

    async def start():
        starting = server.SglangServer("actor_infer rank 0")
        try:
            await starting.start({"host": "127.0.0.1", "page_sizes": 1}, {"SGLANG_USE_CPU_ENGINE": "1"})
        finally:
            await starting.stop()

    with raises_error(ConfigError, "page_sizes", "page_size?"):
        asyncio.run(start())
    known = set(SglangConfig.model_fields) - set(SglangConfig.own_keys)
    assert known >= set(PASSED_ON) | set(REJECTED)
    assert known >= {name for name in own if not name.startswith("_")}


@pytest.mark.slow
def test_fp16_weights_are_read_back_and_computed_with():
    with stood_in():
        engine = Live(strategy(), replace(biased(), dtype="fp16"))
        try:
            check_in_fp16(engine)
        finally:
            engine.close()
