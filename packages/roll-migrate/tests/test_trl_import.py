"""Scripts, YAML files and command lines of TRL: expected keys worked out by hand, and every argument reported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from roll_core.errors import ConfigError, UnsupportedError
from roll_core.plugins.registry import load_registry
from roll_migrate.command import import_config
from roll_migrate.rules import value_at
from roll_migrate.trl import import_trl
from roll_testing.errors import raises_error

FILES = Path(__file__).parent / "trl"
ZERO_3 = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}
EXPECTED = {
    "grpo_sums.py": {
        "pipeline": "rlvr",
        "exp_name": "sums",
        "pretrain": "Qwen/Qwen3-0.6B",
        # 4 processes × 4 × 4 steps are 64 responses, in groups of 4
        "rollout_batch_size": 16,
        "num_return_sequences_in_group": 4,
        "response_length": 256,
        "ppo_epochs": 2,
        # A batch takes 4 / 2 optimizer steps in each of 2 passes.
        "max_steps": 10,
        "save_steps": 5,
        "use_kl_loss": True,
        "kl_loss_coef": 0.04,
        "kl_loss_unbiased": True,
        "reference": None,
        "pg_clip_low": 0.2,
        "pg_clip_high": 0.28,
        "adv_estimator": "reinforce",
        "norm_mean_type": "group",
        "norm_epsilon": None,
        "loss_agg_mode": "seq-mean-token-sum-norm",
        "max_len_mask": True,
        "track_with": [],
        "rewards.trl.components.exact": {"reward": "function", "function": "grpo_sums:exact"},
        "rewards.trl.components.think_format_reward.weight": 0.5,
        "rewards.trl.components.think_format_reward.function": "trl.rewards:think_format_reward",
        "actor_train.data_args.file_name": "hf://sums-lab/Sums-10K?split=train[:90%25]",
        "actor_train.data_args.messages": "prompt",
        "actor_train.data_args.chat_template_kwargs": {"enable_thinking": False},
        "actor_train.training_args.learning_rate": 2e-6,
        "actor_train.training_args.warmup_ratio": 0.1,
        "actor_train.training_args.warmup_steps": None,
        "actor_train.model_args.lora_rank": 32,
        "actor_train.model_args.lora_alpha": 64,
        "actor_train.model_args.lora_target": ["q_proj", "v_proj"],
        "actor_train.model_args.dtype": None,
        "actor_train.strategy_args.strategy_name": "deepspeed_train",
        "actor_train.strategy_args.strategy_config": ZERO_3,
        "actor_infer.strategy_args.strategy_name": "vllm",
        "actor_infer.strategy_args.strategy_config.gpu_memory_utilization": 0.3,
        "actor_infer.device_mapping": "list(range(0,4))",
        "train_infer_correction.is_weight.upper_bound": 3.0,
        "train_infer_correction.is_weight.weight_type": "sequence",
        "train_infer_correction.is_weight.outside": "mask",
    },
    "dpo_pairs.py": {
        "pipeline": "preference",
        "exp_name": "dpo",
        "output_dir": "runs",
        "pretrain": "models/policy",
        "beta": 0.3,
        "loss_type": ["sigmoid", "sft"],
        "loss_weights": [1.0, 0.2],
        "overlong": "truncate",
        "response_length": 96,
        "eval_steps": 25,
        "actor_train.training_args.learning_rate": 1e-6,
        "actor_train.training_args.num_train_epochs": 2,
        "actor_train.model_args.dtype": "fp32",
        "actor_train.model_args.attn_implementation": "sdpa",
        "actor_train.data_args.file_name": "pairs.jsonl",
        "validation.data_args.file_name": "held_out.jsonl",
        "reference.strategy_args.strategy_name": "deepspeed_infer",
        "reference.strategy_args.strategy_config": {"zero_optimization": {"stage": 3}},
    },
    "sft.yaml": {
        "pipeline": "sft",
        "train_on_prompt": False,
        "sft_train.data_args.file_name": "hf://chats-lab/Chats/small",
        "sft_train.data_args.messages": "messages",
        "sft_train.training_args.num_train_epochs": 1,
        "sft_train.model_args.lora_rank": 8,
        "sft_train.model_args.lora_alpha": 32,
        "sft_train.model_args.lora_target": "all-linear",
        "sft_train.device_mapping": "list(range(0,4))",
    },
    "kto.sh": {
        "pipeline": "preference",
        "exp_name": "kto",
        "max_steps": 100,
        "loss_type": ["kto"],
        "desirable_weight": 1.5,
        "precompute_ref_log_probs": True,
        "reference": None,
        "actor_train.data_args.file_name": "hf://pairs-lab/Labels",
        "actor_train.data_args.response": "completion",
        "actor_train.training_args.gradient_accumulation_steps": 2,
        "actor_train.strategy_args.strategy_name": "hf_train",
        "actor_train.device_mapping": "list(range(0,2))",
    },
}
GRPO = """
from trl import GRPOConfig, GRPOTrainer
from datasets import load_dataset

def exact(completions, **kwargs):
    return [1.0 for _ in completions]

if __name__ == "__main__":
    args = GRPOConfig(ARGUMENTS)
    GRPOTrainer(model="m", reward_funcs=exact, args=args, train_dataset=load_dataset("a/b", split="train")).train()
"""


@pytest.fixture(scope="module")
def registry():
    return load_registry()


def at(config, path):
    return value_at(config, tuple(path.split(".")))


def grpo(arguments, registry, folder, text=GRPO):
    (folder / "run.py").write_text(text.replace("ARGUMENTS", arguments))
    return import_trl(folder / "run.py", registry)


def entry(new, key):
    (found,) = (entry for entry in new.keys if entry.key == key)
    return found


@pytest.mark.parametrize("name", EXPECTED)
def test_imported_run_has_trls_settings(name, registry):
    new = import_trl(FILES / name, registry)
    assert {path: at(new.config, path) for path in EXPECTED[name]} == EXPECTED[name]
    assert all(entry.where for entry in new.keys if entry.status != "added")


@pytest.mark.parametrize(
    ("arguments", "key", "to"),
    [
        ("loss_type='cispo', epsilon_high=5.0", "epsilon_high", {"pg_variant": "cispo", "pg_options.clip_high": 5.0}),
        (
            "loss_type='luspo', epsilon=0.1",
            "epsilon",
            {"pg_variant": "luspo", "pg_options.clip_low": 0.1, "pg_options.clip_high": 0.1, "pg_clip": None},
        ),
        ("epsilon=0.1", "epsilon", {"pg_clip": 0.1, "loss_agg_mode": "token-mean", "norm_epsilon": 1e-4}),
        ("importance_sampling_level='sequence'", "importance_sampling_level", {"pg_variant": "gspo"}),
        ("loss_type='sapo', sapo_temperature_neg=1.2", "sapo_temperature_neg", {"pg_options.tau_neg": 1.2}),
        ("scale_rewards='batch'", "scale_rewards", {"adv_estimator": "reinforce", "norm_std_type": "batch"}),
        ("multi_objective_aggregation='normalize_then_sum'", "multi_objective_aggregation", {"adv_estimator": "gdpo"}),
        ("beta=0.1", "beta", {"reference.strategy_args.strategy_name": "hf_infer", "kl_loss_coef": 0.1}),
        ("bf16=False, fp16=True", "fp16", {f"actor_{name}.model_args.dtype": "fp16" for name in ("train", "infer")}),
        ("deepspeed={'zero_optimization': {'stage': 2}}", "deepspeed.zero_optimization.stage",
         {"actor_train.strategy_args.strategy_config.zero_optimization.stage": 2}),
        ("num_train_epochs=2", "num_train_epochs", {"max_steps": "???"}),
        ("generation_kwargs={'min_p': 0.1}", "generation_kwargs.min_p", {"actor_infer.generating_args.min_p": 0.1}),
        ("use_vllm=True, vllm_importance_sampling_mode='token_truncate'", "vllm_importance_sampling_mode",
         {"train_infer_correction.is_weight.weight_type": "token"}),
    ],
)  # fmt: skip
def test_argument_has_targets(arguments, key, to, registry, tmp_path):
    new = grpo(arguments, registry, tmp_path)
    assert entry(new, key).status in ("renamed", "changed", "unsupported")
    assert {path: at(new.config, path) for path in to} == to


@pytest.mark.parametrize(
    ("argument", "target"),
    [
        ("learning_rate=float(input())", "actor_train.training_args.learning_rate"),
        ("max_steps=len('ab')", "max_steps"),
        ("lr_scheduler_type=f'{1}'", "actor_train.training_args.lr_scheduler_type"),
        ("sync_ref_model=True", "sync_ref_model"),
        ("tools=[print]", "tools"),
        ("neftune_noise_alpha=5", "neftune_noise_alpha"),
    ],
)
def test_arguments_without_counterpart_stay_for_check(argument, target, registry, tmp_path):
    new = grpo(argument, registry, tmp_path)
    found = entry(new, argument.partition("=")[0])
    assert found.status == "unsupported"
    assert found.where.endswith("run.py:9")
    assert at(new.config, target) is not None
    assert import_config("trl", tmp_path / "run.py", tmp_path / "o.yaml", registry, as_json=False, verbose=False) == 1


def test_names_of_runs_may_be_computed(registry, tmp_path):
    new = grpo("output_dir=f'runs/{1}', report_to='none'", registry, tmp_path)
    assert not entry(new, "output_dir").to
    assert at(new.config, "output_dir") is None


def test_function_that_starts_training_is_not_imported(registry, tmp_path):
    text = GRPO.replace('if __name__ == "__main__":', "if True:")
    new = grpo("max_steps=3", registry, tmp_path, text)
    assert entry(new, "reward_funcs").status == "unsupported"
    assert at(new.config, "rewards.exact.function") == "???"


def test_streamed_data_stay_on_the_disk_in_sft(registry, tmp_path):
    file = tmp_path / "sft.py"
    file.write_text(
        "from datasets import load_dataset\nfrom trl import SFTConfig, SFTTrainer\n"
        'SFTTrainer("m", SFTConfig(max_steps=3), train_dataset=load_dataset("a/b", split="train", streaming=True))\n'
    )
    assert import_trl(file, registry).config["streaming"] is True
    text = GRPO.replace('split="train")', 'split="train", streaming=True)')
    assert "streaming" not in grpo("max_steps=3", registry, tmp_path, text).config


def test_mapped_rows_are_refused_with_their_steps(registry, tmp_path):
    text = GRPO.replace('split="train")', 'split="train").map(exact).shuffle(seed=1).select(range(8))')
    new = grpo("max_steps=3", registry, tmp_path, text)
    assert at(new.config, "train_dataset.steps") is None
    assert new.config["train_dataset.steps"] == "map(…), then select(…)"
    assert at(new.config, "actor_train.data_args.file_name") == "hf://a/b?split=train"


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"prompt": "1+1="}, {"template": "plain", "messages": None}),
        ({"prompt": [{"role": "user", "content": "1+1="}]}, {"template": None, "messages": "prompt"}),
    ],
)
def test_rows_of_a_file_decide_between_chats_and_text(row, columns, registry, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n" + json.dumps(row) + "\n")
    text = GRPO.replace('"a/b", split="train"', f'"json", data_files="{file}"')
    new = grpo("num_train_epochs=4, num_generations=4", registry, tmp_path, text)
    assert {name: at(new.config, f"actor_train.data_args.{name}") for name in columns} == columns
    assert new.config["rollout_batch_size"] == 2
    assert new.config["max_steps"] == 4


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("from trl import SFTTrainer\nSFTTrainer(model='m', args=parse())", 2),
        ("from trl import PRMTrainer\nPRMTrainer(model='m')", 0),
        ("print(1)", 0),
    ],
)
def test_script_without_literal_arguments_is_refused(text, line, registry, tmp_path):
    with raises_error(UnsupportedError, f"run.py:{line}" if line else "run.py"):
        grpo("", registry, tmp_path, text)


def test_script_that_is_no_python_is_located(registry, tmp_path):
    with raises_error("ROLL-C020", at=f"{tmp_path / 'run.py'}:2"):
        grpo("", registry, tmp_path, "x = 1\nx ==== 2\n")


def test_yaml_of_the_command_line_needs_its_trainer(registry, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("model_name_or_path: m\ndataset_name: a/b\nlearning_rate: 1.0e-5\n")
    with pytest.raises(ConfigError):
        import_trl(file, registry)
    assert import_trl(file, registry, {"trainer": "reward"}).pipeline == "reward_model"


def test_command_of_trl_reads_its_yaml_file(registry, tmp_path):
    (tmp_path / "grpo.yaml").write_text("learning_rate: 1.0e-5\nnum_generations: 4\n")
    (tmp_path / "run.sh").write_text(
        "trl grpo --config grpo.yaml --model_name_or_path m --dataset_name a/b --reward_funcs my.rewards.exact \\\n"
        "  get_soft_overlong_punishment --num_generations 2 --accelerate_config zero3 --num_processes 2 --no_bf16\n"
    )
    new = import_trl(tmp_path / "run.sh", registry)
    expected = {
        "num_return_sequences_in_group": 2,
        "actor_train.training_args.learning_rate": 1e-5,
        "actor_train.device_mapping": "list(range(0,2))",
        "actor_train.strategy_args.strategy_config.zero_optimization.stage": 3,
        "actor_train.model_args.dtype": "fp32",
        "rewards.exact.function": "my.rewards:exact",
        "soft_overlong_penalty": {"l_max": 1280, "l_cache": 256},
    }
    assert {path: at(new.config, path) for path in expected} == expected
