"""`roll-core check` and `run` look at what a config names: models, rows, columns, reward functions."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

import pyarrow as pa
import pyarrow.parquet
import pytest
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers

from roll_core.api.files import FileCheck
from roll_core.cli import main as cli
from roll_core.config import load
from roll_core.data.templates import NAMED
from roll_core.errors import ConfigError
from roll_core.plugins.registry import load_registry
from roll_core.spec.config import DataArguments
from roll_core.spec.providers import InferProvider, TrainProvider
from roll_testing.errors import mentions

GRPO = """\
pipeline: rlvr
pretrain: model
actor_train:
  data_args: {file_name: rows.jsonl}
  training_args: {per_device_train_batch_size: 128}
  strategy_args: {strategy_name: hf_train}
actor_infer:
  strategy_args: {strategy_name: hf_infer}
rewards:
  math:
    reward: math_rule
validation:
  data_args:
    file_name: [val.jsonl]
"""
SFT = """\
pipeline: sft
exp_name: taught
output_dir: out
sft_train:
  model_args: {random_init: {model_type: qwen3}}
  data_args: {file_name: sft.jsonl}
  strategy_args: {strategy_name: hf_train}
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory in which `GRPO` is good."""
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    Path("model/config.json").write_text('{"model_type": "qwen3"}')
    write("rows.jsonl", {"prompt": "1+1=", "ground_truth": "2"})
    write("val.jsonl", {"prompt": "2+2=", "ground_truth": "4"})
    write("sft.jsonl", {"prompt": "2+2=", "response": "4"})
    return tmp_path


def write(name, *rows):
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def mistakes(text, check=None):
    """(line, column, key) of each."""
    Path("run.yaml").write_text(text)
    try:
        load(Path("run.yaml"), (), load_registry(), check or FileCheck())
    except ConfigError as error:
        places = [(each.where.split(":"), each.key) for each in error.problems]
        assert {place[0] for place, _ in places} == {"run.yaml"}
        return [(int(place[1]), int(place[2]), key) for place, key in places]
    return []


def function(name):
    return GRPO.replace("reward: math_rule", f"{{reward: function, function: '{name}'}}").replace("math:\n   ", "math:")


def test_a_config_whose_files_are_there_is_good(here):
    assert mistakes(GRPO) == []


def test_missing_files_are_all_reported_with_other_errors(here):
    Path("rows.jsonl").unlink()
    Path("model/config.json").unlink()
    write("val.jsonl", {"promt": "2+2="})
    wrong = function("no_such_module:score").replace("strategy_name: hf_train", "strategy_nam: hf_train")
    assert mistakes(wrong) == [
        (2, 11, "pretrain"),
        (4, 26, "actor_train.data_args.file_name"),
        (6, 3, "actor_train.strategy_args.strategy_name"),
        (6, 19, "actor_train.strategy_args.strategy_nam"),
        (10, 38, "rewards.math.function"),
        (12, 3, "validation.data_args.prompt"),
    ]


def test_no_files_looks_at_the_config_alone(here, capsys):
    Path("rows.jsonl").unlink()
    Path("run.yaml").write_text(GRPO)
    assert cli.main(["check", "run.yaml"]) == 2
    assert "run.yaml:4:26: ROLL-D001 actor_train.data_args.file_name" in capsys.readouterr().err
    assert cli.main(["check", "--no-files", "run.yaml"]) == 0


@pytest.mark.parametrize(
    "source", ["no/such/model", "./model-2", "~/no such model", "~no-such-user/model", "/no/such/model", "val.jsonl"]
)
def test_a_model_that_is_no_directory_is_a_mistake(here, source):
    assert mistakes(GRPO.replace("pretrain: model", f"pretrain: {source}")) == [(2, 11, "pretrain")]


def test_a_models_id_on_the_hub_is_not_looked_for(here):
    assert mistakes(GRPO.replace("pretrain: model", "pretrain: Qwen/Qwen3-0.6B")) == []


def test_ids_of_modelscope_need_its_library(here, monkeypatch):
    text = GRPO.replace("pretrain: model", "pretrain: Qwen/Qwen3-0.6B")
    monkeypatch.setenv("MODEL_DOWNLOAD_TYPE", "MODELSCOPE")
    monkeypatch.setattr("roll_core.data.modelscope.find_spec", lambda name: object())
    assert mistakes(text) == []
    monkeypatch.setattr("roll_core.data.modelscope.find_spec", lambda name: None)
    assert [key for *_, key in mistakes(text)] == ["pretrain"]
    assert [key for *_, key in mistakes(text + "system_envs: {MODEL_DOWNLOAD_TYPE: HUGGINGFACE_HUB}\n")] == []


def test_a_later_config_may_read_what_an_earlier_one_writes(here, capsys):
    Path("sft.yaml").write_text(SFT)
    text = GRPO.replace("pretrain: model", "pretrain: ./out/taught/latest/export")
    Path("grpo.yaml").write_text(text.replace("rows.jsonl", "out/taught/rows.jsonl"))
    assert cli.main(["check", "sft.yaml", "grpo.yaml"]) == 0
    Path("sft.yaml").write_text(SFT + "sede: 1\n")
    assert cli.main(["check", "sft.yaml", "grpo.yaml"]) == 2
    assert "grpo.yaml" not in capsys.readouterr().err
    assert cli.main(["check", "grpo.yaml", "sft.yaml"]) == 2
    assert cli.main(["check", "grpo.yaml"]) == 2
    assert cli.main(["check", "sft.yaml", "grpo.yaml", "exp_name=another", "output_dir=elsewhere"]) == 2


@pytest.mark.parametrize(
    ("rows", "key"),
    [
        ([{"promt": "a", "ground_truth": "1"}], "prompt"),
        ([{"prompt": 5, "ground_truth": "1"}], "file_name"),
        ([{"prompt": "a", "ground_truth": "1"}, {"prompt": None}], "file_name"),
    ],
)
def test_rows_that_a_run_would_refuse_are_mistakes(here, rows, key):
    write("rows.jsonl", *rows)
    assert [(line, found) for line, _, found in mistakes(GRPO)] == [(4, f"actor_train.data_args.{key}")]


def test_rows_of_sft_need_a_response_and_those_of_rewards_do_not(here):
    write("sft.jsonl", {"prompt": "2+2="})
    assert [key for *_, key in mistakes(SFT)] == ["sft_train.data_args.response"]
    write("sft.jsonl", {"chat": [{"role": "user", "content": "2+2="}]})
    chat = SFT.replace("file_name: sft.jsonl", "file_name: sft.jsonl, messages: chat")
    assert [key for *_, key in mistakes(chat)] == ["sft_train.data_args.file_name"]


def test_reward_columns_are_checked_in_the_rows_they_score(here):
    write("rows.jsonl", {"prompt": "a"})
    write("val.jsonl", {"prompt": "a"})
    assert mistakes(GRPO) == [(10, 3, "rewards.math.ground_truth")]
    several = GRPO.replace("validation:", "  other:\n    {reward: math_rule, ground_truth: answer}\nvalidation:")
    write("rows.jsonl", {"prompt": "a", "tag": "math", "ground_truth": "1"})
    write("val.jsonl", {"prompt": "a", "tag": "other", "answer": "1"})
    assert mistakes(several) == []
    write("val.jsonl", {"prompt": "a", "tag": "other", "ground_truth": "1"}, {"prompt": "a", "tag": "third"})
    assert [key for *_, key in mistakes(several)] == ["rewards.other.ground_truth", "validation.data_args.tag"]


def test_parquet_files_are_looked_at(here):
    pyarrow.parquet.write_table(pa.table({"question": ["a"], "ground_truth": ["1"]}), "rows.parquet")
    assert [key for *_, key in mistakes(GRPO.replace("rows.jsonl", "rows.parquet"))] == ["actor_train.data_args.prompt"]


@pytest.mark.parametrize(
    ("module", "name", "good"),
    [
        ("def score(prompt, response, ground_truth): return 1.0", "mine:score", True),
        ("def score(prompt, response, ground_truth): return 1.0", "mine:scor", False),
        ("def score(prompt, response, answer): return 1.0", "mine:score", False),
        ("def score(prompt, response, *, answer=None, **row): return 1.0", "mine:score", True),
        ("def score(prompt): return 1.0", "mine:score", False),
        ("import no_such_module", "mine:score", False),
        ("import os; os._exit(3)", "mine:score", False),
        ("score = 1", "mine:score", False),
    ],
)
def test_a_reward_function_must_load_and_fit_the_rows(here, module, name, good):
    Path("mine.py").write_text(module)
    assert mistakes(function(name)) == ([] if good else [(10, 38, "rewards.math.function")])


def test_errors_in_a_subdirectory_name_the_base_directory(here, monkeypatch):
    Path("mine").mkdir()
    Path("mine/judge.py").write_text("def score(prompt, response): return 1.0\n")
    Path("mine/run.yaml").write_text(function("mine.judge:score"))
    assert mistakes(function("mine.judge:score")) == []
    monkeypatch.chdir("mine")
    with pytest.raises(ConfigError) as error:
        load(Path("run.yaml"), (), load_registry(), FileCheck())
    found = {each.key: each.hint for each in error.value.problems}
    assert set(found) == {
        "pretrain",
        "actor_train.data_args.file_name",
        "rewards.math.function",
        "validation.data_args.file_name.0",
    }
    assert all(hint.endswith(f"cd {here}") for hint in found.values())


def test_slow_module_is_reported_but_not_an_error(here, capsys, monkeypatch):
    monkeypatch.setattr("roll_core.api.files.TIMEOUT_S", 0.01)
    Path("mine.py").write_text("import time\ntime.sleep(600)\ndef score(prompt, response): return 1.0\n")
    Path("run.yaml").write_text(function("mine:score"))
    assert cli.main(["check", "run.yaml"]) == 0
    assert mentions(capsys.readouterr().out, "run.yaml", "rewards.math")


def test_code_for_another_interpreter_is_not_imported(here):
    text = function("nowhere:score")
    assert mistakes(text.replace("reward: function", "reward: function, system_envs: {PYTHONPATH: lib}")) == []
    assert mistakes("system_envs: {PYTHONPATH: lib}\n" + text) == []


def test_a_run_makes_the_same_check_before_it_makes_anything(here, capsys):
    write("sft.jsonl", {"promt": "2+2=", "response": "4"})
    Path("sft.yaml").write_text(SFT)
    assert cli.main(["run", "sft.yaml"]) == 2
    assert "sft.yaml:6:3: ROLL-D001 sft_train.data_args.prompt" in capsys.readouterr().err
    assert not Path("out").exists()


@pytest.mark.parametrize("command", ["check", "run"])
def test_an_override_of_several_configs_names_the_config(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("sft.yaml", "second.yaml"):
        Path(name).write_text(SFT)
    words = [command, "--no-files", "sft.yaml", "second.yaml", "actor_train.learning_rte=1"]
    assert cli.main(words) == 2
    output = capsys.readouterr().err
    assert mentions(output, "(sft.yaml)", "actor_train")
    assert command == "run" or mentions(output, "(second.yaml)")
    assert cli.main([command, "--no-files", "sft.yaml", "actor_train.learning_rte=1"]) == 2
    assert "(sft.yaml)" not in capsys.readouterr().err


def test_every_file_needs_the_columns_of_its_rewards(here):
    write("rows.jsonl", {"prompt": "a"})
    assert mistakes(GRPO) == [(10, 3, "rewards.math.ground_truth")]
    write("rows.jsonl", {"prompt": "a", "ground_truth": "1"})
    write("val.jsonl", {"prompt": "a"})
    assert mistakes(GRPO) == [(10, 3, "rewards.math.ground_truth")]
    Path("mine.py").write_text("def score(prompt, response, ground_truth): return 1.0")
    assert mistakes(function("mine:score")) == [(10, 38, "rewards.math.function")]
    write("val.jsonl", {"prompt": "a", "ground_truth": "1"})
    assert mistakes(function("mine:score")) == []


CHAT = [{"role": "user", "content": "2+2="}, {"role": "assistant", "content": "4"}]


def test_a_misspelt_template_is_a_mistake(here):
    text = SFT.replace("file_name: sft.jsonl", "file_name: sft.jsonl, template: chatlm")
    assert [key for *_, key in mistakes(text)] == ["sft_train.data_args.template"]


@pytest.mark.parametrize("column", ["chat", "prompt"])
def test_chats_need_a_template_of_the_tokenizer_or_a_name(here, column):
    write("rows.jsonl", {column: CHAT[:1], "ground_truth": "2"})
    chats = GRPO.replace("file_name: rows.jsonl", f"file_name: rows.jsonl, messages: {column}")
    at = ["actor_train.data_args.template"]
    assert mistakes(chats) == []
    assert [key for *_, key in mistakes(chats + "tokenizer: {kind: byte}\n")] == at
    Path("model/tokenizer_config.json").write_text("{}")
    assert [key for *_, key in mistakes(chats)] == at
    assert mistakes(chats.replace(f"messages: {column}", f"messages: {column}, template: chatml")) == []
    missing = chats.replace(f"messages: {column}", "messages: none")
    assert [key for *_, key in mistakes(missing)] == ["actor_train.data_args.messages"]
    Path("model/chat_template.jinja").write_text("{{ messages[0].content }}")
    assert mistakes(chats) == []


@pytest.mark.parametrize("source", ["byte", "char", "model"])
def test_lengths_that_drop_every_row_are_mistakes(here, source):
    if source == "model":
        tokenizer = Tokenizer(models.WordLevel({"2": 0, "+": 1, "=": 2, "a": 3, "[U]": 4}, unk_token="[U]"))
        tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
        tokenizer.save("model/tokenizer.json")
        text = SFT.replace("random_init: {model_type: qwen3}", "model_name_or_path: model")
    else:
        text = SFT + f"tokenizer: {{kind: {source}}}\n"
    write("sft.jsonl", *[{"prompt": "2+2=", "response": "a" * 9}] * 150)
    assert mistakes(text) == []
    assert [key for *_, key in mistakes(text + "prompt_length: 3\n")] == ["prompt_length"]
    assert [key for *_, key in mistakes(text + "response_length: 8\n")] == ["response_length"]
    assert mistakes(text + "response_length: 8\noverlong: truncate\n") == []
    write("sft.jsonl", *[{"prompt": "2+2=", "response": "a" * 9}] * 150, {"prompt": "2", "response": "a"})
    assert mistakes(text + "prompt_length: 3\n") == []
    assert [k for *_, k in mistakes(text.replace("sft.jsonl", "sft.jsonl, max_samples: 150") + "prompt_length: 3\n")]


def test_named_templates_are_those_of_the_schema():
    assert ["native", *NAMED] == list(get_args(DataArguments.model_fields["template"].annotation))


# -- images ------------------------------------------------------------------------------------------------------------


def write_vision_model():
    Path("model/config.json").write_text('{"model_type": "qwen2_5_vl"}')
    processor = {"image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2_5_VLProcessor"}
    Path("model/preprocessor_config.json").write_text(json.dumps(processor))


def unable(registry):
    """Strategies of `GRPO` that declare that they do not read images, by role."""
    by_role = {"actor_train": (TrainProvider, "hf_train"), "actor_infer": (InferProvider, "hf_infer")}
    return {
        f"{role}.strategy_args.strategy_name"
        for role, (kind, name) in by_role.items()
        if not registry.find(kind, name).capabilities.images
    }


IMAGE_PART = [{"type": "image", "image": "a.png"}, {"type": "text", "text": "1+1="}]


@pytest.mark.parametrize(
    ("row", "keys"),
    [
        ({"prompt": "1+1=", "ground_truth": "2", "pictures": ["a.png"]}, "images: pictures"),
        ({"chat": [{"role": "user", "content": IMAGE_PART}], "ground_truth": "2"}, "messages: chat, template: chatml"),
    ],
)
@pytest.mark.parametrize("able", [True, False])
def test_images_need_roles_that_read_them(here, row, keys, able):
    write_vision_model()
    write("rows.jsonl", row)
    text = GRPO.replace("file_name: rows.jsonl", f"file_name: rows.jsonl, {keys}")
    if not able:
        text = text.replace("strategy_name: hf_train", "strategy_name: megatron_train")
    lacking = unable(load_registry()) | (set() if able else {"actor_train.strategy_args.strategy_name"})
    found = {key for _, _, key in mistakes(text)}
    assert lacking <= found
    assert "pretrain" not in found


@pytest.mark.parametrize(("model_type", "able"), [("qwen2_5_vl", True), ("gemma3", False), ("mistral3", False)])
def test_engines_may_read_images_of_some_models(here, model_type, able):
    write_vision_model()
    Path("model/config.json").write_text(json.dumps({"model_type": model_type}))
    write("rows.jsonl", {"prompt": "1+1=", "ground_truth": "2", "pictures": ["a.png"]})
    text = GRPO.replace("file_name: rows.jsonl", "file_name: rows.jsonl, images: pictures")
    found = {key for _, _, key in mistakes(text.replace("strategy_name: hf_infer", "strategy_name: sglang"))}
    assert ("actor_infer.strategy_args.strategy_name" in found) is not able


def test_images_need_a_processor(here):
    write("rows.jsonl", {"prompt": "1+1=", "ground_truth": "2", "pictures": ["a.png"]})
    text = GRPO.replace("file_name: rows.jsonl", "file_name: rows.jsonl, images: pictures")
    assert (2, 11, "pretrain") in mistakes(text)
    Path("model/preprocessor_config.json").write_text('{"image_processor_type": "Qwen2VLImageProcessor"}')
    assert (2, 11, "pretrain") in mistakes(text)
    for name, package in {"PixtralProcessor": "torchvision", "SmolVLMProcessor": "num2words"}.items():
        keys = {"image_processor_type": "PixtralImageProcessor", "processor_class": name}
        Path("model/preprocessor_config.json").write_text(json.dumps(keys))
        assert ((2, 11, "pretrain") in mistakes(text)) is (find_spec(package) is None)
    made = mistakes("tokenizer: {kind: byte}\n" + text)
    assert "tokenizer" in {key for _, _, key in made}


def test_videos_need_a_processor_that_reads_them(here):
    write_vision_model()
    write("rows.jsonl", {"prompt": "1+1=", "ground_truth": "2", "clips": ["a.mp4"]})
    text = GRPO.replace("file_name: rows.jsonl", "file_name: rows.jsonl, videos: clips")
    assert "pretrain" not in {key for _, _, key in mistakes(text)}
    Path("model/preprocessor_config.json").write_text(
        '{"image_processor_type": "CLIPImageProcessor", "processor_class": "LlavaProcessor"}'
    )
    assert (2, 11, "pretrain") in mistakes(text)
    lacking = text.replace("strategy_name: hf_train", "strategy_name: megatron_train")
    assert "actor_train.strategy_args.strategy_name" in {key for _, _, key in mistakes(lacking)}


@pytest.mark.parametrize(
    ("trainer", "key"),
    [
        ("megatron_train", "actor_train.strategy_args.strategy_name"),
        ("fsdp2_train, strategy_config: {ulysses_size: 2}", "actor_train.strategy_args.strategy_config"),
        ("fsdp2_train, strategy_config: {ring_size: 2}", "actor_train.strategy_args.strategy_config"),
    ],
)
def test_strategies_without_images_are_found_without_files(here, trainer, key):
    text = GRPO.replace("file_name: rows.jsonl", "file_name: rows.jsonl, images: pictures")
    Path("run.yaml").write_text(text.replace("strategy_name: hf_train", f"strategy_name: {trainer}"))
    with pytest.raises(ConfigError) as caught:
        load("run.yaml", (), load_registry())
    assert key in {problem.key for problem in caught.value.problems}


@pytest.mark.parametrize("image", ["http://127.0.0.1:1/a.png", "missing.png", "corrupt.png", "../a.png"])
def test_unreadable_images_of_the_first_rows_are_found(here, image):
    write_vision_model()
    Path("corrupt.png").write_bytes(b"\x89PNG no image")
    write("rows.jsonl", {"prompt": "1+1=", "ground_truth": "2", "pictures": [image]})
    text = GRPO.replace("file_name: rows.jsonl", "file_name: rows.jsonl, images: pictures")
    for keys in ("images: pictures", "images: pictures, allow_urls: true"):
        found = mistakes(text.replace("images: pictures", keys))
        assert [key for _, _, key in found] == ["actor_train.data_args.file_name"]
    assert not mistakes(text.replace("images: pictures", "images: pictures, broken_images: drop"))


def test_named_templates_are_refused_for_rows_with_images(here):
    write_vision_model()
    write("rows.jsonl", {"chat": [{"role": "user", "content": IMAGE_PART}], "ground_truth": "2"})
    Image.new("RGB", (28, 28)).save("a.png")
    text = GRPO.replace("file_name: rows.jsonl", "file_name: rows.jsonl, messages: chat, template: chatml")
    assert [key for _, _, key in mistakes(text)] == ["actor_train.data_args.template"]


@pytest.mark.parametrize("name", ["images", "image", "videos", "audio"])
def test_columns_of_media_that_no_key_names_are_refused(here, name):
    write("rows.jsonl", {"prompt": "1+1=", "ground_truth": "2", name: ["a.png"]})
    assert [key for _, _, key in mistakes(GRPO)] == ["actor_train.data_args.file_name"]
