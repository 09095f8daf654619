"""Whole runs of the sft pipeline."""

import contextlib
import ipaddress
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest
import torch
import yaml
from safetensors.torch import load_file

from roll_core.errors import ModelError
from roll_testing.errors import mentions


def test_a_run_leaves_a_complete_record(runs):
    result = runs.ok(runs.sft(track_with=["tensorboard"], eval_steps=2, save_steps=2))
    made = {path.name for path in result.run_dir.path.iterdir()}
    expected = {
        "config.yaml",
        "run.json",
        "metrics.jsonl",
        "log.txt",
        "report.html",
        "export",
        "checkpoints",
        "tokenizer",
    }
    assert expected <= made
    record = json.loads(result.run_dir.record.read_text(encoding="utf-8"))
    assert record["outcome"] == "finished"
    assert record["steps_done"] == record["steps_asked"] == 4
    assert "roll-core" in [plugin["package"] for plugin in record["plugins"]]
    lines = runs.metrics(result)
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    assert [("val/loss" in line) for line in lines] == [True, False, True, False, True]
    assert lines[-1]["val/loss"] < lines[0]["val/loss"]
    assert sorted(path.name for path in result.run_dir.checkpoints.iterdir()) == ["step-2", "step-4"]


def test_stage_times_sum_to_the_wall_time(runs):
    result = runs.ok(runs.sft())
    for line in runs.metrics(result):
        stages = sum(v for k, v in line.items() if k.startswith("time/") and k != "time/step")
        assert stages == pytest.approx(line["time/step"], rel=0.02)
    record = json.loads(result.run_dir.record.read_text(encoding="utf-8"))
    wall = record["ended"] - record["started"]
    assert sum(row["seconds"] for row in record["time"]) == pytest.approx(wall, rel=0.02, abs=0.2)


def test_export_loads_in_transformers_with_equal_answers(runs):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    result = runs.ok(runs.sft(eval_steps=4))
    model = AutoModelForCausalLM.from_pretrained(result.run_dir.export)
    tokenizer = AutoTokenizer.from_pretrained(result.run_dir.export)
    # The held-out loss, computed by transformers on one row at a time.
    total = count = hits = 0.0
    for line in (runs.folder / "val.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        prompt = tokenizer(row["prompt"])["input_ids"]
        answer = [*tokenizer(row["response"])["input_ids"], tokenizer.eos_token_id]
        with torch.no_grad():
            logits = model(torch.tensor([prompt + answer])).logits[0]
        logprobs = torch.log_softmax(logits[len(prompt) - 1 : -1], -1)
        total -= logprobs[torch.arange(len(answer)), torch.tensor(answer)].sum().item()
        count += len(answer)
        hits += (logprobs.argmax(-1) == torch.tensor(answer)).sum().item()
    assert 0 < hits < count
    assert runs.metrics(result)[-1]["val/loss"] == pytest.approx(total / count, abs=1e-4)
    assert runs.metrics(result)[-1]["val/token_accuracy"] == pytest.approx(hits / count, abs=1e-9)


def test_the_token_accuracy_does_not_depend_on_how_a_step_is_cut(local_runs):
    budget = {"use_dynamic_batching_in_train": True, "max_tokens_per_microbatch_in_train": 20}
    cuts = {
        "whole": ({"per_device_train_batch_size": 15}, {}),
        "uneven": ({"per_device_train_batch_size": 3, "gradient_accumulation_steps": 5}, {}),
        "by_tokens": ({"per_device_train_batch_size": 15}, budget),
    }
    found = []
    for name, (training, role) in cuts.items():
        config = local_runs.sft(exp_name=name, max_steps=2, eval_steps=2)
        config["sft_train"]["training_args"] |= training
        config["sft_train"] |= role
        result = local_runs.ok(config)
        lines = local_runs.metrics(result)
        found.append([lines[1]["train/token_accuracy"], lines[0]["val/token_accuracy"], lines[2]["val/token_accuracy"]])
    assert f"{found[-1][-1]:.1%}  (val/token_accuracy)" in local_runs.screen.getvalue()
    assert "held-out token accuracy" in result.run_dir.report.read_text(encoding="utf-8")
    assert 0 < found[0][0] < 1
    # Three digits and an end, in 15 rows: a share of 60 tokens, not of microbatches.
    assert found[0][0] * 60 == pytest.approx(round(found[0][0] * 60), abs=1e-4)
    assert found[1] == pytest.approx(found[0], abs=1e-6)
    assert found[2] == pytest.approx(found[0], abs=1e-6)


def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(runs):
    whole = runs.ok(runs.sft(exp_name="whole", max_steps=6, save_steps=6))
    first = runs.ok(runs.sft(exp_name="halves", max_steps=6, save_steps=3), "max_steps=6")
    checkpoint = first.run_dir.checkpoints / "step-3"
    second = runs.ok(runs.sft(exp_name="halves", max_steps=6, save_steps=6, resume_from_checkpoint=str(checkpoint)))
    assert runs.timeless(second) == runs.timeless(whole)
    one = load_file(whole.run_dir.export / "model.safetensors")
    other = load_file(second.run_dir.export / "model.safetensors")
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_resuming_a_finished_run_is_an_error(runs):
    runs.ok(runs.sft(save_steps=2))
    result = runs.run(runs.sft(resume_from_checkpoint=True))
    assert result.outcome == "failed"
    assert "zero_steps" in str(result.error)


def test_the_saved_config_is_the_config(runs):
    from roll_core.config import load

    result = runs.ok(runs.sft(max_steps=1))
    original = load(runs.folder / "sft.yaml", [], runs.registry).config
    assert load(result.run_dir.config, [], runs.registry).config == original


def test_data_error_is_named_and_the_record_says_failed(runs):
    with (runs.folder / "train.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"id": 99, "prompt": "12a>", "response": "12a", "ground_truth": "12a"}) + "\n")
    result = runs.run(runs.sft())
    assert result.outcome == "failed"
    assert "row 65" in str(result.error)
    assert "'a'" in str(result.error)
    assert result.run_dir.report.is_file()


def test_responses_are_scored_if_the_run_has_engine_and_rewards(runs):
    config = runs.sft(
        actor_infer=runs.rlvr()["actor_infer"],
        rewards={"digits": {"reward": "function", "function": "rollrewards:constant"}},
        eval_steps=4,
    )
    lines = runs.metrics(runs.ok(config))
    assert lines[-1]["val/score/mean"] == 1.0
    assert lines[-1]["val/num_samples"] == 32
    assert np.isfinite(lines[-1]["val/loss"])


def test_a_learning_rate_of_zero_is_found_out(runs):
    config = runs.sft(
        actor_infer=runs.rlvr()["actor_infer"],
        rewards={"digits": {"reward": "function", "function": "rollrewards:constant"}},
        eval_steps=1,
    )
    config["sft_train"]["training_args"]["learning_rate"] = 0.0
    result = runs.run(config)
    assert type(result.error).__name__ == "WeightsUnchangedError"
    assert mentions(str(result.error), "rate", "0")


def test_a_model_that_the_run_before_has_not_written_is_named(local_runs):
    config = local_runs.sft(pretrain="output/before/latest/export", tokenizer=None)
    del config["sft_train"]["model_args"]["random_init"]
    result = local_runs.run(config)
    assert isinstance(result.error, ModelError)
    assert mentions(str(result.error), "output/before/latest/export")


def test_rl_renders_chats_as_the_preceding_sft(local_runs):
    runs = local_runs
    rows = [{"prompt": f"{n}+1", "response": str(n + 1), "ground_truth": str(n + 1), "how": "Add."} for n in range(8)]
    (runs.folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    sft = runs.sft(max_steps=1, tokenizer={"kind": "byte"}, prompt_length=80)
    del sft["validation"]
    sft["sft_train"]["training_args"]["per_device_train_batch_size"] = 8
    sft["sft_train"]["data_args"] |= {"system": "how", "template": "chatml"}
    trained = runs.ok(sft)
    rlvr = runs.rlvr(max_steps=1, pretrain=str(trained.run_dir.export), prompt_length=80, tokenizer=None)
    rlvr["actor_train"]["data_args"] |= {"system": "how"}
    del rlvr["actor_train"]["model_args"]["random_init"]
    found = runs.ok(rlvr)
    sample = json.loads(found.run_dir.samples.read_text(encoding="utf-8").splitlines()[0])
    asked = sample["prompt"].removeprefix("<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\n")
    assert asked.removesuffix("+1<|im_end|>\n<|im_start|>assistant\n").isdecimal()


@pytest.mark.parametrize("answered", [0, 3])
def test_chat_rows_without_response_are_scored_by_rewards_only(local_runs, answered):
    """The held-out loss is that of the rows which have one."""
    rows = [json.loads(line) for line in (local_runs.folder / "val.jsonl").read_text(encoding="utf-8").splitlines()]
    chat = local_runs.folder / "chat.jsonl"

    def write(number, rows):
        with chat.open("w", encoding="utf-8") as file:
            for at, row in enumerate(rows):
                messages = [{"role": "user", "content": row["prompt"]}]
                if at < number:
                    messages.append({"role": "assistant", "content": row["response"]})
                file.write(json.dumps({"chat": messages}) + "\n")

    config = local_runs.sft(
        actor_infer=local_runs.rlvr()["actor_infer"],
        rewards={"digits": {"reward": "function", "function": "rollrewards:constant"}},
        validation={"data_args": {"file_name": str(chat), "messages": "chat", "template": "plain"}},
        max_steps=1,
        eval_steps=1,
    )
    config["sft_train"]["data_args"]["template"] = "plain"
    write(answered, rows)
    last = local_runs.metrics(local_runs.ok(config))[-1]
    assert last["val/score/mean"] == 1.0
    assert ("val/loss" in last) == (answered > 0)
    if answered:
        assert last["val/num_samples"] == len(rows)
        del config["actor_infer"], config["rewards"]
        assert local_runs.run(config | {"exp_name": "refused"}).outcome == "failed"  # then a loss is all there could be
        write(answered, rows[:answered])
        alone = local_runs.metrics(local_runs.ok(config | {"exp_name": "alone"}))[-1]
        assert last["val/loss"] == pytest.approx(alone["val/loss"], abs=1e-6)


RAY_CLIENT = """
import sys
from ray._raylet import GcsClient
try:
    GcsClient(address=sys.argv[1]).internal_kv_keys(b"", None)
except Exception as error:
    print(type(error).__name__)
"""


@pytest.mark.ray
@pytest.mark.slow
def test_processes_listen_on_loopback_only_and_refuse_strangers(local_runs):
    config = local_runs.sft(executor="ray", max_steps=10_000)
    config["sft_train"] |= {"device_mapping": [0, 1]}
    config["sft_train"]["training_args"] |= {"lr_scheduler_type": "constant"}
    path = local_runs.folder / "run.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    env = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "GLOO_"))}
    with subprocess.Popen([sys.executable, "-m", "roll_core", "run", str(path)], env=env) as run:
        try:
            metrics = local_runs.folder / "output/sft/001/metrics.jsonl"
            while not (metrics.exists() and metrics.read_text(encoding="utf-8").count("\n") > 1):
                assert run.poll() is None
                time.sleep(0.1)
            listeners = {}
            for process in (psutil.Process(run.pid), *psutil.Process(run.pid).children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    for each in process.net_connections("inet"):
                        if each.status == psutil.CONN_LISTEN:
                            address = ipaddress.ip_address(each.laddr.ip)
                            found = str(getattr(address, "ipv4_mapped", None) or address)
                            listeners.setdefault(found, []).append(process.name())
            # Clients that know the address of the run's Ray, and not its token.
            (gcs,) = (each for each in psutil.Process(run.pid).children() if each.name() == "gcs_server")
            (port,) = {each.laddr.port for each in gcs.net_connections("inet") if each.status == psutil.CONN_LISTEN}
            strangers = ({"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64})
            refusals = [
                subprocess.run(
                    [sys.executable, "-c", RAY_CLIENT, f"127.0.0.1:{port}"],
                    env=env | stranger,
                    stdout=subprocess.PIPE,
                    text=True,
                    timeout=200,
                    check=True,
                ).stdout.strip()
                for stranger in strangers
            ]
        finally:
            run.send_signal(signal.SIGINT)
            run.wait(90)
    assert set(listeners) == {"127.0.0.1"}
    assert any(name.startswith("ray::") for name in listeners["127.0.0.1"])
    assert refusals == ["AuthenticationError"] * 2
