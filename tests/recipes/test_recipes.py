"""Each recipe passes `check` and fits its named hardware, with the sizes of its model and without downloads."""

import json
from pathlib import Path

import pytest

import roll_core as roll
from roll_core.data.rows import read_rows
from roll_testing.runs import TINY
from shared_tests.dataset_hub import serving_datasets, use_hub

RECIPES = Path(__file__).parents[2] / "recipes"
QWEN3 = {
    "model_type": "qwen3", "vocab_size": 151936, "head_dim": 128, "num_hidden_layers": 28, "num_key_value_heads": 8,
    "num_attention_heads": 16, "tie_word_embeddings": True, "max_position_embeddings": 40960,
}  # fmt: skip
MODELS = {
    "Qwen/Qwen3-0.6B": (QWEN3 | {"hidden_size": 1024, "intermediate_size": 3072}, 0.596),
    "Qwen/Qwen3-1.7B": (QWEN3 | {"hidden_size": 2048, "intermediate_size": 6144}, 1.721),
    "Qwen/Qwen3-4B-Base": (
        QWEN3 | {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
        4.022),
    "Qwen/Qwen3-8B-Base": (
        QWEN3 | {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
                 "tie_word_embeddings": False}, 8.191),
    "Qwen/Qwen2.5-7B": (
        {"model_type": "qwen2", "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944,
         "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "tie_word_embeddings": False,
         "max_position_embeddings": 131072}, 7.616),
    "Qwen/Qwen3-30B-A3B": (
        QWEN3 | {"model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
                 "num_attention_heads": 32, "num_key_value_heads": 4, "moe_intermediate_size": 768,
                 "num_experts": 128, "num_experts_per_tok": 8, "tie_word_embeddings": False}, 30.532),
}  # fmt: skip
"""Keys of `config.json`, and billions of parameters as the model cards round them."""
MODELS["Qwen/Qwen3-1.7B-Base"] = MODELS["Qwen/Qwen3-1.7B"]
HARDWARE = {
    "gsm8k/full.yaml": (1, 23, 60),
    "gsm8k/lora.yaml": (1, 23, 60),
    "gsm8k/full_1.7b.yaml": (1, 23, 60),
    "dapo_math_7b/dapo.yaml": (1, 79, 400),
    "qwen3_8b/grpo.yaml": (1, 79, 400),
    "qwen3_8b/lora_4b.yaml": (1, 23, 60),
    "moe_30b_a3b/gspo.yaml": (4, 79, 1500),
    "sft/sft.yaml": (1, 79, 60),
    "dpo/dpo.yaml": (1, 23, 60),
    "code_rl/grpo.yaml": (1, 79, 60),
    "search/agentic.yaml": (1, 79, 60),
}
"""Nodes, and free GiB of a device and of a host."""


def test_every_config_of_a_recipe_is_planned():
    assert {str(each.relative_to(RECIPES)) for each in RECIPES.glob("*/*.yaml")} == set(HARDWARE)


@pytest.mark.parametrize("name", HARDWARE)
def test_a_recipe_passes_check_and_fits_its_hardware(name, tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    nodes, slot, host = HARDWARE[name]
    model, billions = MODELS[roll.check(RECIPES / name, files=False).config.pretrain]
    (tmp_path / "config.json").write_text(json.dumps(model))
    overrides = {"pretrain": str(tmp_path)}
    assert roll.check(RECIPES / name, overrides, files=False).warnings == ()
    planned = roll.plan(RECIPES / name, overrides, slot_memory_gib=slot, host_memory_gib=host)
    assert planned.fits
    assert len(planned.plan.placement.nodes) == nodes
    assert planned.plan.known
    assert {round(each.parameters / 1e9, 3) for each in planned.plan.memory} == {billions}
    assert not roll.plan(RECIPES / name, overrides, nodes=nodes, slot_memory_gib=slot / 8, host_memory_gib=host).fits


@pytest.mark.parametrize("folder", sorted({name.partition("/")[0] for name in HARDWARE}))
def test_a_recipe_states_that_it_has_not_run(folder):
    assert "not run yet" in (RECIPES / folder / "README.md").read_text()


GSM8K = {"question": "How many?", "answer": "3 * 343 = <<3*343=1029>>1029\n#### 1,029"}
CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
MBPP = {"text": "Add.", "test_list": ["assert add(1, 2) == 3", "assert add(0, 0) == 0"]}


@pytest.mark.parametrize(
    ("name", "repo", "subset", "row", "values"),
    [
        ("gsm8k/full.yaml", "openai/gsm8k", "main", GSM8K,
         {"prompt": "How many?\nThink step by step. Write the final answer in \\boxed{}.", "ground_truth": "1029"}),
        ("qwen3_8b/grpo.yaml", "openai/gsm8k", "main", GSM8K, {"ground_truth": "1029"}),
        ("sft/sft.yaml", "trl-lib/Capybara", "default", {"messages": CHAT}, {"messages": CHAT}),
        ("code_rl/grpo.yaml", "google-research-datasets/mbpp", "full", MBPP,
         {"prompt": "Add.\nYour program must pass this test:\nassert add(1, 2) == 3\nReply with one block of Python.",
          "test_cases": MBPP["test_list"]}),
    ],
)  # fmt: skip
def test_the_columns_of_a_recipe_fit_its_data_set(name, repo, subset, row, values, tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    config = roll.check(RECIPES / name, files=False).config
    roles = [worker for worker in config.roles().values() if worker.data_args.file_name]
    sources = [*(worker.data_args for worker in roles), config.validation.data_args]
    assert len(sources) == 2
    with serving_datasets() as hub:
        use_hub(hub.url, tmp_path, monkeypatch)
        hub.push(repo, {subset: {split: [row] for split in ("train", "test", "validation")}})
        for data in sources:
            (read,) = read_rows(data)
            assert values.items() <= dict(read.values).items()


@pytest.mark.slow
def test_the_first_model_trains_in_small(tmp_path, monkeypatch):
    """The recipe of docs/first-model.md with a tiny model, on a CPU, with rows of a local hub."""
    pytest.importorskip("datasets")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    engine = {"strategy_config": None, "strategy_name": "hf_infer"}
    overrides = {
        "platform": "cpu", "num_gpus_per_node": None, "executor": "local", "pretrain": None, "track_with": [],
        "tokenizer": {"kind": "byte"}, "max_steps": 2, "save_steps": 2, "eval_steps": 2, "export_model": False,
        "prompt_length": 160, "response_length": 8, "rollout_batch_size": 2, "num_return_sequences_in_group": 2,
        "actor_train.model_args": {"dtype": "fp32", "random_init": TINY | {"max_position_embeddings": 256}},
        "actor_train.strategy_args": {"strategy_name": "hf_train", "strategy_config": None},
        "actor_train.training_args.gradient_accumulation_steps": 2,
        "actor_train.device_mapping": [0], "actor_infer.device_mapping": [0],
        "actor_infer.model_args.dtype": "fp32", "actor_infer.strategy_args": engine, "rewards.gsm8k.world_size": 1,
    }  # fmt: skip
    with serving_datasets() as hub:
        use_hub(hub.url, tmp_path, monkeypatch)
        hub.push("openai/gsm8k", {"main": {"train": [GSM8K] * 4, "test": [GSM8K]}})
        first = roll.run(RECIPES / "qwen3_8b/grpo.yaml", overrides)
        assert (first.steps_done, first.metrics["val/num_samples"], first.metrics["reward/failures"]) == (2, 1, 0)
        resumed = roll.run(RECIPES / "qwen3_8b/grpo.yaml", overrides | {"max_steps": 3})
        assert [row["step"] for row in resumed.history if row["step"]] == [1, 2, 3]
