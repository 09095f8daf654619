"""Guards that only a fault trips, each with the fault put in.

The faults are put into this process, so the local executor runs; what the executors do differently is tested with them.
"""

import json
from dataclasses import replace

import numpy as np
import pytest

from roll_core.errors import GuardTrippedError, StaleWeightsError, WeightSyncError
from roll_core.runtime.run import weight_sync as controller
from roll_core.runtime.run.probe import Compared, ProbeReading
from roll_core.types import WeightReceipt
from roll_infer_hf.engine import HFInferStrategy
from roll_testing.errors import mentions


@pytest.fixture
def spoil_answers(monkeypatch):
    """Change every output that the engine hands out."""

    def spoil(change):
        generate = HFInferStrategy.generate

        async def spoilt(self, request):
            completion = await generate(self, request)
            return replace(completion, outputs=tuple(change(output) for output in completion.outputs))

        monkeypatch.setattr(HFInferStrategy, "generate", spoilt)

    return spoil


def counts(result) -> dict[str, int]:
    return json.loads(result.run_dir.record.read_text(encoding="utf-8"))["guards"]["counts"]


def test_an_engine_that_keeps_its_old_weights_is_found_out(local_runs, monkeypatch):
    update = HFInferStrategy.update_weights

    async def stale(self, version, manifest, tensors, *, shared=False):
        return replace(await update(self, version, manifest, tensors, shared=shared), version=version - 1)

    monkeypatch.setattr(HFInferStrategy, "update_weights", stale)
    result = local_runs.run(local_runs.rlvr())
    assert type(result.error).__name__ == "StaleWeightsError"
    assert "actor_infer rank 0" in str(result.error)
    assert counts(result) == {"weight_manifest": 1}


def test_engine_weights_may_differ_if_the_guard_only_warns(local_runs, monkeypatch):
    update = HFInferStrategy.update_weights

    async def stale(self, version, manifest, tensors, *, shared=False):
        return replace(await update(self, version, manifest, tensors, shared=shared), version=version - 1)

    monkeypatch.setattr(HFInferStrategy, "update_weights", stale)
    result = local_runs.ok(local_runs.rlvr(guards={"weight_manifest": "warn"}))
    assert counts(result)["weight_manifest"] >= 3


def test_interrupted_publish_ends_the_run_despite_the_guard(local_runs, monkeypatch):
    update = HFInferStrategy.update_weights

    async def breaks_off(self, version, manifest, tensors, *, shared=False):
        if version < 2:
            return await update(self, version, manifest, tensors, shared=shared)
        return await update(self, version, manifest, half(tensors), shared=shared)

    def half(tensors):
        yield next(iter(tensors))
        raise WeightSyncError("the sender hung up")

    monkeypatch.setattr(HFInferStrategy, "update_weights", breaks_off)
    result = local_runs.run(local_runs.rlvr(guards={"weight_manifest": "warn"}))
    assert isinstance(result.error, WeightSyncError)
    assert mentions(str(result.error), "sender")
    assert counts(result) == {"weight_manifest": 1}


def test_a_probe_on_which_the_sides_disagree_ends_the_run(local_runs, monkeypatch):
    def reading(gap):
        zeros = np.zeros(1, np.float32)
        return ProbeReading((Compared(np.ones(1, np.int64), zeros + gap, zeros),), ())

    async def far_apart(*arguments, **given):
        return {0: reading(0.1), 1: reading(0.7)}

    monkeypatch.setattr(controller, "logprob_probe", far_apart)
    for action in ("error", "warn"):
        result = local_runs.run(local_runs.rlvr(guards={"logprob_probe": action}))
        assert "guard logprob_probe" in str(result.error)
        assert mentions(str(result.error), "actor_infer rank 1", "actor_train", "0.7")


@pytest.mark.parametrize("prompt_logprobs", [True, False])
def test_engine_that_loads_no_weights_fails_the_second_publish(local_runs, monkeypatch, prompt_logprobs):
    async def copies_the_manifest(self, version, manifest, tensors, *, shared=False):
        self._core.version = version
        return WeightReceipt(version=version, digests={entry.name: entry.digest for entry in manifest.tensors})

    monkeypatch.setattr(HFInferStrategy, "update_weights", copies_the_manifest)
    probe = controller.logprob_probe

    async def probe_engine(*roles, can, **options):
        readings = await probe(*roles, can=replace(can, prompt_logprobs=prompt_logprobs), **options)
        assert all(bool(reading.fixed) == prompt_logprobs for reading in readings.values())
        return readings

    monkeypatch.setattr(controller, "logprob_probe", probe_engine)
    config = local_runs.rlvr(guards={"logprob_probe": "warn"})
    config["actor_infer"]["device_mapping"] = [1]
    result = local_runs.run(config)
    assert isinstance(result.error, StaleWeightsError)
    assert result.steps_done == 1
    assert counts(result) == {"logprob_probe": 1}


def keep_multiplying_with_these_weights(runner):
    """What the engine makes of its parameters after an update it makes of those that they are now."""
    parameters = list(runner._model.parameters())
    copies, refresh = [each.detach().clone() for each in parameters], runner.refresh

    def refresh_from_copies():
        held = [each.data for each in parameters]
        for each, copy in zip(parameters, copies, strict=True):
            each.data = copy
        refresh()
        for each, data in zip(parameters, held, strict=True):
            each.data = data

    runner.refresh = refresh_from_copies


def test_replica_with_a_stale_packed_copy_is_found_and_named(local_runs, monkeypatch):
    """Its digests are right: they are of the weights that it was sent, and not of what it made of them."""
    config = local_runs.rlvr(max_steps=2)
    config["actor_infer"] |= {"device_mapping": [0, 1]}
    local_runs.ok(config)

    update = HFInferStrategy.update_weights

    async def leaving_one_stale(self, version, manifest, tensors, *, shared=False):
        receipt = await update(self, version, manifest, tensors, shared=shared)
        if version == 0 and self._mesh.rank == 1:
            keep_multiplying_with_these_weights(self._core.runner)
        return receipt

    monkeypatch.setattr(HFInferStrategy, "update_weights", leaving_one_stale)
    result = local_runs.run(config)
    assert isinstance(result.error, StaleWeightsError)
    assert "actor_infer rank 1" in str(result.error)
    assert counts(result) == {"logprob_probe": 1}


@pytest.mark.parametrize("probe", ["warn", "off"])
def test_doubled_logprobs_end_the_run(local_runs, spoil_answers, probe):
    spoil_answers(lambda output: replace(output, logprobs=2 * output.logprobs))
    result = local_runs.run(local_runs.rlvr(max_steps=1, guards={"logprob_probe": probe}))
    guard = "logprob_probe" if probe == "warn" else "logprob_gap"
    assert counts(result) == {guard: 1}
    assert isinstance(result.error, GuardTrippedError)
    assert result.error.guard == guard


def test_logprobs_that_are_not_the_trainers_are_pointed_out(local_runs, spoil_answers):
    spoil_answers(lambda output: replace(output, logprobs=output.logprobs - 0.2))
    result = local_runs.ok(local_runs.rlvr(max_steps=1))
    assert counts(result) == {"logprob_gap": 1}
    strict = local_runs.run(local_runs.rlvr(max_steps=1, guards={"logprob_gap": "error"}))
    assert "guard logprob_gap" in str(strict.error)
    tolerant = local_runs.ok(local_runs.rlvr(max_steps=1, guards={"logprob_gap": {"threshold": 1.0}}))
    assert counts(tolerant) == {}


def test_tokens_that_do_not_exist_are_named(local_runs, spoil_answers):
    spoil_answers(lambda output: replace(output, token_ids=np.full_like(output.token_ids, 99)))
    result = local_runs.run(local_runs.rlvr())
    assert "guard token_round_trip" in str(result.error)
    assert mentions(str(result.error), "99")
    assert mentions(str(result.error), "'hf_infer'", "roll-infer-hf")


def test_ids_of_a_padded_embedding_are_trained_on(local_runs):
    """Models as Qwen have more ids than their tokenizers: 64 and 13 here, so most sampled ids are such."""
    config = local_runs.rlvr(max_steps=2)
    model = config["actor_train"]["model_args"]
    model["random_init"] = model["random_init"] | {"vocab_size": 64}
    result = local_runs.ok(config)
    assert counts(result) == {}
    assert local_runs.metrics(result)[-1]["response_length/mean"] > 1


def test_a_guard_that_only_warns_of_tokens_trips_once_per_batch(local_runs, spoil_answers):
    spoil_answers(lambda output: replace(output, versions=output.versions - 1))
    result = local_runs.ok(local_runs.rlvr(max_steps=2, guards={"token_round_trip": "warn"}))
    assert counts(result) == {"token_round_trip": 2}


FALLING = """
import itertools
calls = itertools.count(START)

def falling(prompt, response, **row):
    return -float(next(calls))
"""


def test_falling_run_is_named_and_a_resumed_run_remembers(local_runs):
    (local_runs.folder / "rollfalls.py").write_text(FALLING.replace("START", "0"))
    guard = {"falling_reward": {"after": 1, "window": 8, "p_value": 0.001}}
    config = local_runs.rlvr(max_steps=10, save_steps=4, guards=guard)
    config["rewards"] = {"falling": {"reward": "function", "function": "rollfalls:falling"}}
    result = local_runs.ok(config)
    record = json.loads(result.run_dir.record.read_text(encoding="utf-8"))
    (event,) = record["guards"]["events"]
    assert record["guards"]["counts"] == {"falling_reward": 2}
    assert (event["guard"], event["since"], event["step"]) == ("falling_reward", 8, 9)  # shown as steps 9 and 10
    assert mentions(event["message"], "score/mean", "step 3", "10")
    assert "guard falling_reward" in local_runs.screen.getvalue()

    guard["falling_reward"]["action"] = "error"
    step_8 = str(result.run_dir.checkpoints / "step-8")
    (local_runs.folder / "rollfalls.py").write_text(FALLING.replace("START", "1000"))
    resumed = local_runs.run(config | {"resume_from_checkpoint": step_8})
    assert getattr(resumed.error, "guard", "") == "falling_reward"
    assert [line["step"] for line in local_runs.metrics(resumed)][-1] == 9
