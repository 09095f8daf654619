"""Evaluation harnesses against an engine: scores equal those of transformers' responses.

The tests with the libraries run in an environment of their own: `./run test-engines harnesses`. The environment
variable `ROLL_HARNESS_PYTHON` names another interpreter that has them.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from roll_core.cli.main import main
from roll_core.config import load
from roll_core.data.tokenizers import make_tokenizer
from roll_core.errors import ConfigError, EnvironmentsFailedError
from roll_core.plugins.registry import load_registry
from roll_core.spec.config import TokenizerConfig
from roll_pipeline_agentic.config import missing_harness
from roll_pipeline_agentic.harness import inspect_scores, lm_eval_scores
from roll_testing.errors import raises_error
from roll_testing.runs import TINY

PYTHON = os.environ.get("ROLL_HARNESS_PYTHON", sys.executable)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QUESTIONS = [f"digit {number}?" for number in range(6)]
LM_EVAL = """
task: local_digits
dataset_path: json
dataset_kwargs: {data_files: {test: rows.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: [zzzz], max_gen_toks: 4, temperature: 0}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
CHOICES = """
task: local_choices
dataset_path: json
dataset_kwargs: {data_files: {test: rows.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_target: "{{gold}}"
doc_to_choice: "{{choices}}"
target_delimiter: ""
"""
INSPECT = """
import json

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig
from inspect_ai.scorer import exact
from inspect_ai.solver import generate


@task
def digits():
    rows = [json.loads(line) for line in open("rows.jsonl")]
    samples = [Sample(input=row["question"], target=row["answer"]) for row in rows]
    return Task(dataset=samples, solver=generate(), scorer=exact(), config=GenerateConfig(temperature=0, max_tokens=4))
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a model, a config, and rows of which every other one has the model's greedy response."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    alphabet = "".join(sorted(set("".join(QUESTIONS) + CHATML + "userassistantsystem0123456789")))
    tokenizer = make_tokenizer(TokenizerConfig(kind="char", alphabet=alphabet), texts=(), directory=tmp_path)
    tokenizer.chat_template = CHATML
    torch.manual_seed(0)
    settings = {**TINY, "max_position_embeddings": 256, "vocab_size": len(tokenizer), "initializer_range": 0.5}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings), dtype=torch.float32)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    rows = []
    for index, question in enumerate(QUESTIONS):
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]
        reply = model.generate(ids, max_new_tokens=4, do_sample=False)[0, ids.shape[1] :]
        answer = tokenizer.decode(reply, skip_special_tokens=True)
        plain = tokenizer(question, return_tensors="pt").input_ids
        likely = tokenizer.decode(model.generate(plain, max_new_tokens=3, do_sample=False)[0, plain.shape[1] :])
        choices = [f"{index}", likely, "12", question]
        rows.append({"question": question, "answer": answer if index % 2 else "no", "choices": choices, "gold": 1})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (tmp_path / "digits.yaml").write_text(LM_EVAL, encoding="utf-8")
    (tmp_path / "choices.yaml").write_text(CHOICES, encoding="utf-8")
    (tmp_path / "digits.py").write_text(INSPECT, encoding="utf-8")
    config = {
        "pipeline": "evaluate", "exp_name": "scored", "prompt_length": 128, "response_length": 8, "track_with": [],
        "actor_infer": {"model_args": {"dtype": "fp32"}, "strategy_args": {"strategy_name": "hf_infer"}},
        "validation": {"data_args": {"file_name": "rows.jsonl", "prompt": "question"}},
        "rewards": {"digits": {"reward": "exact_match", "ground_truth": "answer"}},
    }  # fmt: skip
    (tmp_path / "eval.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    return tmp_path


def command(harness: str, tasks: str, *words: str) -> list[str]:
    return ["eval", "model", "eval.yaml", "--harness", harness, "--tasks", tasks, f"harness_python={PYTHON}", *words]


def metrics(site: Path, harness: str, run: str = "001") -> dict[str, Any]:
    path = site / "output" / f"scored-{harness}" / run / "metrics.jsonl"
    return json.loads(path.read_text(encoding="utf-8").splitlines()[-1])


needs_harness = pytest.mark.skipif(
    bool(missing_harness(PYTHON, "lm_eval") or missing_harness(PYTHON, "inspect_ai")),
    reason="needs lm-eval and inspect-ai",
)


@needs_harness
@pytest.mark.slow
def test_lm_eval_scores_equal_those_of_greedy_responses(site: Path) -> None:
    assert main(command("lm_eval", "digits.yaml")) == 0
    line = metrics(site, "lm_eval")
    assert line["val/local_digits/exact_match"] == line["val/local_digits/score/mean"] == 0.5
    assert line["val/num_samples"] == 6
    # The standard error of 6 values with 3 ones: sqrt(0.25 / 5).
    assert line["val/local_digits/score/ci_low"] == pytest.approx(0.5 - 1.959964 * (0.25 / 5) ** 0.5)
    run = site / "output" / "scored-lm_eval" / "001"
    assert "local_digits" in (run / "report.html").read_text(encoding="utf-8")
    assert list((run / "harness").rglob("samples_local_digits_*.jsonl"))


@needs_harness
@pytest.mark.slow
def test_inspect_scores_equal_those_of_greedy_responses(site: Path) -> None:
    assert main(command("inspect_ai", "digits.py")) == 0
    line = metrics(site, "inspect_ai")
    assert line["val/digits/score/mean"] == line["val/digits/mean"] == 0.5
    assert line["val/num_samples"] == 6


@needs_harness
@pytest.mark.slow
@pytest.mark.parametrize("api", ["auto", "completions"])
def test_multiple_choice_equals_transformers(site: Path, api: str) -> None:
    """Log-likelihoods of the given answers, and whether they are the most likely ones."""
    assert main(command("lm_eval", "choices.yaml", f"harness_api={api}")) == 0
    line = metrics(site, "lm_eval")
    logs = site / "output" / "scored-lm_eval" / "001" / "harness"
    (file,) = logs.rglob("samples_local_choices_*.jsonl")
    samples = [json.loads(text) for text in file.read_text(encoding="utf-8").splitlines()]
    model = AutoModelForCausalLM.from_pretrained(site / "model")
    tokenizer = AutoTokenizer.from_pretrained(site / "model")
    right = 0
    for sample in samples:
        prompt = tokenizer(sample["doc"]["question"]).input_ids
        expected = []
        for choice, (logprob, greedy) in zip(sample["doc"]["choices"], sample["filtered_resps"], strict=True):
            answer = tokenizer(choice).input_ids
            logprobs_TV = (
                model(torch.tensor([prompt + answer])).logits[0].detach().log_softmax(-1)[len(prompt) - 1 : -1]
            )
            expected.append(float(logprobs_TV.gather(1, torch.tensor(answer)[:, None]).sum()))
            assert float(logprob) == pytest.approx(expected[-1], abs=1e-4)
            assert greedy == str(logprobs_TV.argmax(-1).tolist() == answer)
        right += expected.index(max(expected)) == 1
    assert line["val/local_choices/score/mean"] == pytest.approx(right / len(samples))


CLIENT = """\
import json, os, sys, urllib.error, urllib.request
replies = []
for body in json.load(open("requests.json")):
    headers = {"Authorization": "Bearer " + os.environ["ROLL_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["ROLL_BASE_URL"] + "/completions", json.dumps(body).encode(), headers)
    try:
        replies.append(json.load(urllib.request.urlopen(request)))
    except urllib.error.HTTPError as error:
        replies.append({"status": error.code, **json.load(error)})
json.dump(replies, open("replies.json", "w"))
results = {"results": {"task": {"acc,none": 1.0}}}
json.dump(results, open(sys.argv[sys.argv.index("--output_path") + 1] + "/results_0.json", "w"))
"""


@pytest.fixture
def complete(site: Path) -> Callable[[Sequence[Mapping[str, Any]]], list[dict[str, Any]]]:
    """Sends bodies to `/v1/completions` of a run. The harness is a script."""
    (site / "client.py").write_text(CLIENT, encoding="utf-8")
    script = f'#!/bin/sh\ncase $1 in -m) exec {sys.executable} client.py "$@" ;; esac\n'
    (site / "python").write_text(script, encoding="utf-8")
    (site / "python").chmod(0o755)

    def send(bodies: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        (site / "requests.json").write_text(json.dumps(bodies), encoding="utf-8")
        words = [f"harness_python={site}/python", "harness_api=completions"]
        assert main(command("lm_eval", "any", *words)) == 0
        replies: list[dict[str, Any]] = json.loads((site / "replies.json").read_text(encoding="utf-8"))
        return replies

    return send


SCORED = {"max_tokens": 1, "logprobs": 2, "echo": True, "temperature": 0}


@pytest.mark.slow(ci=True)
def test_completions_equal_transformers(site: Path, complete: Any) -> None:
    model = AutoModelForCausalLM.from_pretrained(site / "model")
    tokenizer = AutoTokenizer.from_pretrained(site / "model")
    prompts = ["digit 0?", "digit 5?igd"]
    ids = [tokenizer(prompt).input_ids for prompt in prompts]
    # `]` may be the text of several tokens, but only one of them is the most likely one.
    ids.append([number % len(tokenizer) for number in range(3, 100, 7)])
    greedy = {"prompt": prompts[0], "max_tokens": 5, "temperature": 0}
    alone, batch, text, cut = complete([SCORED | {"prompt": ids[0], "max_tokens": 0}, SCORED | {"prompt": ids}, greedy,
                                        {**greedy, "stop": ["8"]}])  # fmt: skip
    for row, choice in zip(ids, batch["choices"], strict=True):
        logprobs_TV = model(torch.tensor([row])).logits[0].detach().log_softmax(-1)
        best = logprobs_TV.max(-1)
        logprobs = choice["logprobs"]
        expected = [float(logprobs_TV[at, token]) for at, token in enumerate(row[1:])]
        assert logprobs["token_logprobs"][0] is None
        assert logprobs["token_logprobs"][1:] == pytest.approx([*expected, float(best.values[-1])], abs=1e-4)
        columns = zip(row[1:], logprobs["token_logprobs"][1:-1], logprobs["top_logprobs"][1:-1], strict=True)
        for at, (token, logprob, top) in enumerate(columns):
            assert max(top.values()) == pytest.approx(float(best.values[at]), abs=1e-4)
            assert (logprob == max(top.values())) == (int(best.indices[at]) == token)
        assert logprobs["tokens"] == [tokenizer.decode([token]) for token in [*row, int(best.indices[-1])]]
    assert [choice["index"] for choice in batch["choices"]] == [0, 1, 2]
    whole = batch["choices"][0]["logprobs"]
    assert alone["choices"][0]["logprobs"]["token_logprobs"] == pytest.approx(whole["token_logprobs"][:-1], nan_ok=True)
    assert alone["choices"][0]["text"] == prompts[0]
    inputs = torch.tensor([ids[0]])
    reply = tokenizer.decode(model.generate(inputs, max_new_tokens=5, do_sample=False)[0, len(ids[0]) :])
    assert text["choices"][0]["text"] == reply
    assert cut["choices"][0]["text"] == reply.partition("8")[0]


@pytest.mark.slow(ci=True)
def test_requests_without_a_correct_reply_are_refused(complete: Any) -> None:
    changes: list[dict[str, Any]] = [
        {"prompt": ""}, {"prompt": []}, {"prompt": [-1]}, {"prompt": [10**6]}, {"prompt": [1.5]}, {"prompt": ["a", 3]},
        {"n": 2}, {"stream": True}, {"suffix": "x"}, {"logprobs": 9}, {"max_tokens": 2}, {"echo": False},
        {"temperature": "0"}, {"prompt": "digit" * 40},
    ]  # fmt: skip
    *replies, last = complete([*(SCORED | {"prompt": "digit 0?"} | change for change in changes), {"prompt": "digit"}])
    assert [reply.get("status") for reply in replies] == [400] * len(changes)
    assert replies[-1]["error"]["code"] == "context_length_exceeded"
    assert last["choices"][0]["finish_reason"] in ("stop", "length")


def test_completions_need_logprobs_of_prompts(site: Path) -> None:
    keys = {
        "pipeline": "evaluate_harness", "harness": "lm_eval", "tasks": ["mmlu"], "pretrain": "model",
        "actor_infer": {"strategy_args": {"strategy_name": "hf_infer"}},
    }  # fmt: skip
    config = load({**keys, "harness_api": "completions"}, [], load_registry()).config
    assert config.capabilities()["actor_infer"] == ("prompt_logprobs", "prompt_topk")
    assert load(keys, [], load_registry()).config.capabilities()["actor_infer"] == ()
    with raises_error(ConfigError, "harness_api"):
        load({**keys, "harness": "inspect_ai", "harness_api": "completions"}, [], load_registry())


@needs_harness
@pytest.mark.slow
def test_failed_task_is_located_and_the_run_resumes(site: Path, caplog: Any) -> None:
    assert main(command("lm_eval", "digits.yaml,choices.yaml", "harness_api=chat")) != 0
    assert "choices.yaml" in caplog.text
    assert "harness_api" in caplog.text
    (site / "choices.yaml").write_text(LM_EVAL.replace("local_digits", "local_again"), encoding="utf-8")
    words = ["harness_api=chat", "resume_from_checkpoint=auto"]
    assert main(command("lm_eval", "digits.yaml,choices.yaml", *words)) == 0
    line = metrics(site, "lm_eval", "002")
    assert line["val/local_digits/score/mean"] == line["val/local_again/score/mean"] == 0.5
    assert line["val/num_samples"] == 12
    logs = site / "output" / "scored-lm_eval" / "002" / "harness"
    assert [path.name for path in logs.iterdir()] == ["2-choices.yaml"]


def test_missing_harness_is_located(site: Path) -> None:
    config = {
        "pipeline": "evaluate_harness", "harness": "lm_eval", "tasks": ["gsm8k"], "pretrain": "model",
        "actor_infer": {"strategy_args": {"strategy_name": "hf_infer"}},
    }  # fmt: skip
    (site / "lm_eval.py").unlink(missing_ok=True)
    (site / "python").write_text("#!/bin/sh\necho lm_eval\n", encoding="utf-8")
    (site / "python").chmod(0o755)
    for python, key in ((str(site / "python"), "harness_python"), ("./no-such-python", "harness_python")):
        problems = load({**config, "harness_python": python}, [], load_registry()).config.file_problems()
        assert list(problems) == [key]
    with raises_error(ConfigError, "tasks"):
        load({**config, "tasks": []}, [], load_registry())


@pytest.mark.parametrize("words", [["--harness", "lm_eval"], ["--tasks", "gsm8k"]])
def test_harness_and_tasks_belong_together(site: Path, words: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["eval", "model", "eval.yaml", *words])
    assert ended.value.code == 2


def test_results_of_groups_filters_and_several_scorers(tmp_path: Path) -> None:
    row = {
        "alias": "gsm8k", "exact_match,strict-match": 0.25, "exact_match_stderr,strict-match": 0.1,
        "exact_match,flexible-extract": 0.5, "exact_match_stderr,flexible-extract": "N/A", "sample_len": 8,
    }  # fmt: skip
    (tmp_path / "policy").mkdir()
    results = {"results": {"gsm8k": row}, "n-samples": {"gsm8k": {"original": 9, "effective": 8}}}
    (tmp_path / "policy" / "results_2026.json").write_text(json.dumps(results), encoding="utf-8")
    (scores,) = lm_eval_scores(tmp_path)
    assert scores.values == {"exact_match/strict-match": 0.25, "exact_match/flexible-extract": 0.5}
    assert scores.errors == {"exact_match/strict-match": 0.1}
    assert scores.num_samples == 8
    log: dict[str, Any] = {"status": "success", "eval": {"task": "mix"}, "results": {"completed_samples": 3}}
    log["results"]["scores"] = [
        {"name": "exact", "metrics": {"accuracy": {"value": 0.5}, "stderr": {"value": 0.1}}},
        {"name": "f1", "metrics": {"mean": {"value": 0.75}}},
    ]
    (tmp_path / "log.json").write_text(json.dumps(log), encoding="utf-8")
    (scores,) = inspect_scores(tmp_path)
    assert scores.values == {"exact/accuracy": 0.5, "f1/mean": 0.75}
    assert scores.errors == {"exact/accuracy": 0.1}
    (tmp_path / "log.json").write_text(json.dumps({**log, "status": "error"}), encoding="utf-8")
    with raises_error(EnvironmentsFailedError, "mix"):
        inspect_scores(tmp_path)
