"""`roll-core audit`: findings about rows, tokenizer and chat template, and the exit codes."""

from __future__ import annotations

import itertools
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from roll_core.cli import main as cli
from roll_core.data.rows import Rows, read_rows
from roll_core.data.tokenizers import make_tokenizer
from roll_core.spec.config import DataArguments, RewardConfig, TokenizerConfig
from roll_core.spec.rollout import RewardFunction
from roll_rewards.answers import ExactMatch, MultipleChoice
from roll_rewards.code import CodeReward
from roll_rewards.composite import CompositeReward
from roll_rewards.config import (
    CodeConfig,
    CompositeConfig,
    ExactMatchConfig,
    IFEvalConfig,
    MathRuleConfig,
    MultipleChoiceConfig,
)
from roll_rewards.ifeval import IFEvalReward
from roll_rewards.math_rule import MathRuleReward
from roll_testing.errors import mentions
from roll_testing.image_models import write_processor
from roll_tools import audit, data_audit
from roll_tools.data_audit import AuditFinding, audit_reward_columns, audit_rows, audit_template
from roll_tools.saved_record import SavedRecord
from shared_tests.chat_templates import FAMILIES
from shared_tests.hf_plugins import HF_PACKAGES
from shared_tests.tiny_vision import picture

SFT = """\
pipeline: sft
exp_name: audited
tokenizer: {kind: byte}
prompt_length: 8
response_length: 4
sft_train:
  model_args: {random_init: {model_type: llama}}
  data_args: {file_name: rows.jsonl}
  strategy_args: {strategy_name: hf_train}
"""
GOOD = [{"prompt": "ab", "response": "ba"}, {"prompt": "cd", "response": "dc"}]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ROLL_PLUGINS", HF_PACKAGES)
    (tmp_path / "run.yaml").write_text(SFT)
    write(tmp_path, GOOD)
    return tmp_path


def write(folder: Path, rows: list[dict[str, Any]]) -> None:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def found(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> dict[str, str]:
    """Levels by check."""
    assert cli.main(["audit", *words, "--json"]) == code
    printed = json.loads(capsys.readouterr().out)
    assert printed["ok"] is (code == 0)
    return {each["check"]: each["level"] for each in printed["findings"]}


DPO = """\
pipeline: dpo
tokenizer: {kind: byte}
actor_train:
  model_args: {random_init: {model_type: llama}}
  data_args: {file_name: rows.jsonl}
  strategy_args: {strategy_name: hf_train}
reference: {strategy_args: {strategy_name: hf_infer}}
"""
AGENTIC = """\
pipeline: agentic
tokenizer: {kind: byte}
max_actions_per_traj: 2
custom_envs: {guess: {environment: guess_number, data_args: {file_name: rows.jsonl}}}
train_env_manager: {group_size: 2}
rollout_batch_size: 4
actor_train:
  model_args: {random_init: {model_type: llama}}
  data_args: {template: plain}
  training_args: {per_device_train_batch_size: 4}
  strategy_args: {strategy_name: hf_train}
actor_infer: {strategy_args: {strategy_name: hf_infer}}
"""


@pytest.mark.parametrize(
    ("package", "text", "wrong"),
    [
        ("roll-pipeline-preference", DPO, {"prompt": "a", "chosen": "b"}),
        ("roll-pipeline-agentic,roll-environments", AGENTIC, None),
    ],
)
def test_rows_of_every_pipeline_are_read(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    package: str,
    text: str,
    wrong: Any,
) -> None:
    monkeypatch.setenv("ROLL_PLUGINS", f"{HF_PACKAGES},{package}")
    (folder / "run.yaml").write_text(text)
    good = {"prompt": "a", "chosen": "b", "rejected": "c"}
    write(folder, [good] * 150)
    assert found(capsys, "run.yaml")["rows"] == "ok"
    if wrong is not None:
        write(folder, [*[good] * 150, wrong])
        assert found(capsys, "run.yaml", code=1)["rows"] == "error"
    with (folder / "rows.jsonl").open("a") as file:
        file.write("{")
    assert cli.main(["audit", "run.yaml"]) == 2
    assert mentions(capsys.readouterr().err, "rows.jsonl")


@pytest.mark.parametrize("source", ["run.yaml", "rows.jsonl"])
def test_good_rows_are_0(folder: Path, capsys: pytest.CaptureFixture[str], source: str) -> None:
    levels = found(capsys, source)
    assert levels == dict.fromkeys(
        ("rows", "prompt_length", "response_length", "duplicates", "empty", "stop_token"), "ok"
    )


def test_masks_are_shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["audit", "run.yaml", "--rows", "1"]) == 0
    shown = capsys.readouterr().out
    assert "ab⟦ba<eos>⟧" in shown
    assert "\x1b[" not in shown
    assert "cd" not in shown


def test_masks_contain_the_trained_prompt(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["run.yaml"], ["rows.jsonl"]):
        assert cli.main(["audit", *words, "--rows", "1", "train_on_prompt=true"]) == 0
        assert "a⟦bba<eos>⟧" in capsys.readouterr().out  # nothing predicts the first token
    assert cli.main(["audit", "rows.jsonl", "train_on_prompt=1"]) == 2


def test_unknown_roles_are_warnings(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With bytes, contents are only joined, so that a role has no effect on tokens."""
    question, reply = {"role": "user", "content": "ab"}, {"role": "assistant", "content": "ba"}
    for role, level in (("assitant", "warning"), ("tool", None), ("developer", None)):
        write(folder, [{"messages": [question, {"role": role, "content": "c"}, question, reply]}])
        assert found(capsys, "rows.jsonl").get("roles") == level


def test_broken_rows_are_warnings(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(folder, [*GOOD, GOOD[0], {"prompt": "e", "response": ""}, {"prompt": "long " * 3, "response": "much longer"}])
    levels = found(capsys, "run.yaml")
    assert {check for check, level in levels.items() if level == "warning"} == {
        "prompt_length",
        "response_length",
        "duplicates",
        "empty",
    }


def test_chats_without_replies_are_prompts(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chats = [[{"role": "user", "content": text}] for text in ("ab", "cd")]
    write(folder, [{"messages": chat} for chat in chats])
    levels = found(capsys, "rows.jsonl")
    assert levels["rows"] == "ok"
    assert "stop_token" not in levels
    write(folder, [{"messages": [*chats[0], {"role": "assistant", "content": "ba"}]}, {"messages": chats[1]}])
    levels = found(capsys, "rows.jsonl")
    assert levels["rows"] == "note"  # one without a response
    assert levels["stop_token"] == "ok"


def test_responses_that_are_cut_do_not_train_the_stop_token(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(folder, [*GOOD, {"prompt": "e", "response": "much longer"}])
    assert found(capsys, "run.yaml", "overlong=truncate")["stop_token"] == "warning"
    assert found(capsys, "run.yaml", "overlong=truncate", "response_length=1", code=1)["stop_token"] == "error"


def test_rows_that_are_all_too_long_are_an_error(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert found(capsys, "run.yaml", "prompt_length=1", code=1)["prompt_length"] == "error"
    assert found(capsys, "rows.jsonl", "prompt_length=1", code=1)["prompt_length"] == "error"


def test_rows_that_were_not_read_in_time_are_no_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = DataArguments(file_name="rows.jsonl")
    tokenizer = make_tokenizer(TokenizerConfig(kind="byte"), [], folder)

    def audited(rows: list[dict[str, Any]], seconds: float) -> dict[str, AuditFinding]:
        write(folder, rows)
        limits = {"prompt_length": 8, "response_length": 4, "seconds": seconds}
        return {each.check: each for each in audit_rows(read_rows(data), data, tokenizer, subject="rows", **limits)}

    assert audited(GOOD, 0.0)["rows"].level == "note"
    clock = itertools.count()
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))
    partial = audited([{"prompt": 1, "response": "b"}, *GOOD], 2.5)  # the time suffices for two rows
    assert mentions(partial["encoding"].found, 1, 2)
    assert mentions(partial["rows"].found, 1, 3)


def test_a_wrong_key_or_file_is_2(folder: Path) -> None:
    assert cli.main(["audit", "rows.jsonl", "promt=a"]) == 2
    assert cli.main(["audit", "rows.jsonl", "prompt_length=0"]) == 2
    assert cli.main(["audit", "rows.jsonl", "prompt=["]) == 2  # no YAML
    assert cli.main(["audit", "rows.jsonl", "max_samples=2024-13-45"]) == 2  # no date
    assert cli.main(["audit", "none.jsonl"]) == 2
    assert cli.main(["audit", "run.yaml", "max_stepz=1"]) == 2


def test_columns_of_rewards_are_read_until_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Rows([("rows.jsonl", [{"ground_truth": ""}] * 9)], DataArguments())
    rewards = {"math": MathRuleConfig(reward="math_rule")}
    clock = itertools.count()
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))
    (found,) = audit_reward_columns(rows, rewards, subject="data", seconds=3.5)
    assert mentions(found.found, 3)
    assert not mentions(found.found, 9)
    assert not list(audit_reward_columns(rows, rewards, subject="data", seconds=0.5))


def test_empty_reward_columns_warn_if_a_key_names_them() -> None:
    math = MathRuleConfig(reward="math_rule", tag_included=["sums"], ground_truth="right")
    rows = [
        {"tag": "sums", "right": "2", "hint": " "},
        {"tag": "sums", "right": None, "hint": "a"},
        {"tag": "code", "right": "", "hint": ""},
    ]
    read = Rows([("rows.jsonl", rows)], DataArguments())
    first, second, *_ = audit_reward_columns(read, {"math": math, "code": math}, subject="data")
    assert (first.level, second.level) == ("warning", "note")
    assert "rows.jsonl row 2" in first.found
    assert "rows.jsonl row 1" in second.found
    other = MathRuleConfig(reward="math_rule", ground_truth="tag")
    assert {each.level for each in audit_reward_columns(read, {"math": other}, subject="")} == {"note"}
    full = Rows([("rows.jsonl", [{"right": 0, "hint": False}])], DataArguments())
    assert [each.level for each in audit_reward_columns(full, {"math": math}, subject="")] == ["ok"]
    nested = Rows([("rows.jsonl", [{"reward": {"truth": "2"}}, {"reward": {"truth": ""}}])], DataArguments())
    math = MathRuleConfig(reward="math_rule", ground_truth="reward.truth")
    (found,) = audit_reward_columns(nested, {"math": math}, subject="")
    assert (found.level, "reward.truth" in found.found) == ("warning", True)


def tokenizer_of(folder: Path, name: str = "", template: str = "", eos: str = "") -> Any:
    family = FAMILIES[name or "qwen3"]
    tokenizer = make_tokenizer(TokenizerConfig(kind="byte"), [], folder, control_tokens=family.special)
    tokenizer.eos_token = eos or family.end
    tokenizer.chat_template = template or family.template
    return tokenizer


@pytest.mark.parametrize(
    ("name", "turns", "tools"),
    [
        ("qwen2.5", "ok", "ok"),
        ("qwen3", "ok", "ok"),
        ("qwen3.5", "warning", "ok"),
        ("llama3", "ok", "ok"),
        ("gemma", "ok", "note"),
        ("mistral", "ok", "ok"),
        ("deepseek", "ok", "note"),
        ("glm", "ok", "ok"),
    ],
)
def test_families_keep_tokens_or_not(tmp_path: Path, name: str, turns: str, tools: str) -> None:
    tokenizer = tokenizer_of(tmp_path, name)
    findings = list(audit_template(tokenizer, DataArguments(), subject="actor_train.data_args", multi_turn=True))
    levels = {each.check: each.level for each in findings}
    assert (levels["turns_keep_tokens"], levels["tool_turns_keep_tokens"]) == (turns, tools)
    assert levels["end_of_turn"] == "ok"


def test_reasoning_that_is_removed_is_found(tmp_path: Path) -> None:
    def of(thinking: str) -> str:
        findings = audit_template(tokenizer_of(tmp_path), DataArguments(), subject="data", thinking=thinking)
        (finding,) = [each for each in findings if each.check == "reasoning"]
        return finding.found

    assert of("template") != of("keep")


def test_a_template_without_its_end_token_does_not_train_it(tmp_path: Path) -> None:
    template = FAMILIES["qwen2.5"].template.replace("{{- '<|im_end|>\\n' }}", "{{- '\\n' }}")
    tokenizer = tokenizer_of(tmp_path, template=template, eos="<eos>")
    data = DataArguments(messages="messages")
    chats = [[{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]]
    rows = Rows([("rows.jsonl", [{"messages": each} for each in chats])], data)
    options: dict[str, Any] = {"subject": "rows", "prompt_length": 99, "response_length": 99}
    levels = {each.check: each.level for each in audit_rows(rows, data, tokenizer, **options)}
    assert levels["stop_token"] == "ok"  # the encoder appends the end-of-sequence token that the template lacks
    (end,) = [e for e in audit_template(tokenizer, data, subject="rows") if e.check == "end_of_turn"]
    assert end.level != "ok"


def end_of_turn(tokenizer: Any, **given: Any) -> AuditFinding:
    findings = audit_template(tokenizer, DataArguments(), subject="rows", **given)
    (end,) = [finding for finding in findings if finding.check == "end_of_turn"]
    return end


def test_the_end_of_replies_ends_generation(tmp_path: Path) -> None:
    end = end_of_turn(tokenizer_of(tmp_path, eos="<|endoftext|>"))
    assert end.level == "ok"
    assert mentions(end.found, "<|im_end|>")


def test_end_token_inside_replies_warns_unless_in_the_model(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, "gpt-oss")
    end = end_of_turn(tokenizer)
    assert end.level == "warning"
    assert mentions(end.found, "<|end|>", "<|return|>", "<|call|>")
    stored = tokenizer.convert_tokens_to_ids("<|end|>")
    assert end_of_turn(tokenizer, model_ends=[stored]).level == "ok"


@pytest.mark.parametrize(
    ("eos", "stored", "level"), [(1, [1], "ok"), (2, [1], "ok"), (1, [1, 2], "ok")], ids=["base", "advised", "instruct"]
)
def test_audit_reads_the_end_ids_of_the_model(
    folder: Path, capsys: pytest.CaptureFixture[str], eos: int, stored: list[int], level: str
) -> None:
    """A chat template with `<end>`, and a tokenizer and a generation config with other ends."""
    tokenizer = make_tokenizer(TokenizerConfig(kind="byte"), (), folder / "model", control_tokens=("<end>",))
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(eos)
    reply = "{% if m.role == 'assistant' %}<end>{% else %}>{% endif %}"
    tokenizer.chat_template = f"{{% for m in messages %}}{{{{ m.content }}}}{reply}{{% endfor %}}"
    tokenizer.save_pretrained(folder / "model")
    (folder / "model" / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 1}))
    (folder / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": stored}))
    chat = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "ba"}]
    write(folder, [{"chat": [*chat, *chat]}])
    overrides = ["pretrain=model", "sft_train.data_args.messages=chat", "tokenizer=null", "response_length=16"]
    levels = found(capsys, "run.yaml", "sft_train.model_args.random_init=null", *overrides)
    assert (levels["end_of_turn"], levels["stop_token"]) == (level, "ok")


def test_a_saved_record_has_the_findings() -> None:
    finding = {"check": "rows", "subject": "rows.jsonl", "level": "ok", "found": "2 rows", "remedy": ""}
    assert SavedRecord.of({"audit": [finding]}).audit[0].found == "2 rows"


def test_the_page_has_every_check_and_no_other() -> None:
    page = (Path(__file__).parents[2] / "docs" / "audit.md").read_text(encoding="utf-8")
    source = "".join(Path(str(module.__file__)).read_text(encoding="utf-8") for module in (audit, data_audit))
    yielded = set(re.findall(r'(?:[Ff]inding\(|keeps\()\s*"(\w+)"', source)) | {"prompt_length", "response_length"}
    assert set(re.findall(r"^\| `(\w+)` \| \S", page, re.MULTILINE)) == yielded


def test_rows_that_a_reward_cannot_score_are_named() -> None:
    truths = ["42", r"\$18.90", "no solution", "????", ["1", r"\frac{1}{"], "f(x) = c"]
    read = Rows([("rows.jsonl", [{"ground_truth": each} for each in truths])], DataArguments())
    config = MathRuleConfig(reward="math_rule")
    functions = {"math": MathRuleReward(config)}
    first, _ = audit_reward_columns(read, {"math": config}, subject="data", functions=functions)
    assert (first.check, first.level) == ("reward_rows", "warning")
    assert mentions(first.found, "rows.jsonl row 4", "rows.jsonl row 5", 2, 6)
    assert not mentions(first.found, "rows.jsonl row 3")


def test_the_command_names_rows_that_a_reward_cannot_score(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": "a", "ground_truth": each} for each in ("1", "????")]
    (folder / "rows.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows), encoding="utf-8")
    (folder / "rl.yaml").write_text(
        "pipeline: rlvr\nmax_steps: 1\ntokenizer: {kind: byte}\nprompt_length: 8\nresponse_length: 4\n"
        "actor_train:\n  model_args: {random_init: {model_type: qwen3}}\n  data_args: {file_name: rows.jsonl}\n"
        "  strategy_args: {strategy_name: hf_train}\nactor_infer: {strategy_args: {strategy_name: hf_infer}}\n"
        "rewards: {math: {reward: math_rule}}\n",
        encoding="utf-8",
    )
    assert cli.main(["audit", "rl.yaml", "--json"]) == 0
    found = {each["check"]: each["found"] for each in json.loads(capsys.readouterr().out)["findings"]}
    assert mentions(found["reward_rows"], "rows.jsonl row 2", "????")


@pytest.mark.parametrize(
    ("function", "config", "row"),
    [
        (MultipleChoice, MultipleChoiceConfig(reward="multiple_choice"), {"ground_truth": "Paris"}),
        (ExactMatch, ExactMatchConfig(reward="exact_match"), {"ground_truth": [None]}),
        (IFEvalReward, IFEvalConfig(reward="ifeval"), {"instruction_id_list": ["x:y"], "kwargs": [{}]}),
        (IFEvalReward, IFEvalConfig(reward="ifeval"), {"ground_truth": '{"func_name": "validate_title"'}),
        (CodeReward, CodeConfig(reward="code"), {"test_cases": []}),
    ],
)
def test_rewards_report_rows_that_they_cannot_score(
    function: type[RewardFunction], config: RewardConfig, row: dict[str, object]
) -> None:
    assert function(config).unscorable(row)
    whole = CompositeConfig.model_validate({"reward": "composite", "components": {"part": config.model_dump()}})
    assert CompositeReward(whole).unscorable(row).startswith("part: ")


# -- images ------------------------------------------------------------------------------------------------------------


def test_rows_with_images_show_sizes_tokens_and_positions(folder, capsys):
    model = folder / "model"
    model.mkdir()
    write_processor(model, "qwen2_5_vl")
    picture(84, 56).save(folder / "a.png")
    (folder / "broken.png").write_bytes(b"no image")
    row = {"prompt": "see <image>?", "response": "six", "images": ["a.png"]}
    write(folder, [row, row | {"images": ["broken.png"]}, row | {"images": ["a.png"], "prompt": "<image>now?"}])
    words = ("rows.jsonl", "--tokenizer", "model", "images=images", "broken_images=drop", "prompt_length=20")
    assert cli.main(["audit", *words, "--json", "--rows", "1"]) == 1
    printed = json.loads(capsys.readouterr().out)
    findings = {(finding["check"], finding["level"]): finding["found"] for finding in printed["findings"]}
    assert mentions(findings["images", "ok"], 2, 6)
    assert mentions(findings["images", "warning"], 1, "broken_images")
    assert mentions(findings["prompt_length", "error"], 20)  # with the 6 tokens of the image
    (shown,) = printed["rows"]
    begin = len("<|im_start|>user\nsee <|vision_start|>") - len("<|im_start|>") - len("<|vision_start|>") + 2
    assert mentions(shown["images"][0], 84, 56, 6, begin, begin + 5)
    assert "<|image_pad|> × 6" in "".join(text for text, _ in shown["pieces"])
    assert [trained for text, trained in shown["pieces"] if "image_pad" in text] == [False]


@pytest.mark.parametrize(("names", "level"), [("ab", "ok"), ("aba", "warning")])
def test_equal_texts_about_other_images_are_no_duplicates(folder, capsys, names, level):
    (folder / "model").mkdir()
    write_processor(folder / "model", "qwen2_5_vl")
    for seed, name in enumerate("ab"):
        picture(84, 56, seed).save(folder / f"{name}.png")
    write(folder, [{"prompt": "see <image>?", "response": "six", "images": [f"{name}.png"]} for name in names])
    levels = found(capsys, "rows.jsonl", "--tokenizer", "model", "images=images", "prompt_length=64")
    assert levels["duplicates"] == level
