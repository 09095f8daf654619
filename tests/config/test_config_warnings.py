"""What `roll-core check` says of configs that are valid but probably not meant."""

from pathlib import Path

import pytest

from roll_core.api import prepare
from roll_core.cli import main as cli
from roll_core.config import load
from roll_core.errors import ConfigError
from roll_core.plugins.registry import Registry, load_registry
from roll_testing.errors import mentions, raises_error
from shared_tests.hf_plugins import hf_plugins

REGISTRY = Registry(hf_plugins())
CONFIG = """\
pipeline: rlvr
rollout_batch_size: 4
num_return_sequences_in_group: 4
actor_train:
  data_args: {file_name: rows.jsonl}
  strategy_args: {strategy_name: hf_train}
  training_args: {per_device_train_batch_size: 16}
actor_infer: {strategy_args: {strategy_name: hf_infer}}
reference: {strategy_args: {strategy_name: hf_infer}}
use_kl_loss: true
rewards:
  math: {reward: math_rule}
"""
HALVES = "actor_train.training_args.per_device_train_batch_size=8"
ARGS = "actor_train.training_args"
SCRATCH = "actor_train.model_args.random_init={model_type: qwen3}"
MEAN_FILTER = "rewards.math.query_filter_config.type=mean_filter"
FUNCTION = "rewards.math={reward: function, function: 'mine:score'}"
AHEAD = ["async_generation_ratio=1", "actor_infer.device_mapping=[1]", "actor_train.device_mapping=[0]"]
K1, VANILLA, MASK = "kl_loss_penalty: k1\n", "pg_variant: vanilla\n", "difficulty_mask: true\n"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("added", "overrides", "warned"),
    [
        ("", [], ""),
        (K1, [], "run.yaml:13:1 kl_loss_penalty"),
        (K1, ["kl_loss_penalty=k2"], ""),
        (K1, ["kl_loss_coef=0"], "command line kl_loss_coef"),
        (K1, ["kl_loss_unbiased=true"], ""),
        ("kl_loss_penalty: k2\nkl_loss_unbiased: true\n", [], "run.yaml:14:1 kl_loss_unbiased"),
        (K1, ["use_kl_loss=false", "add_token_level_kl=true"], "run.yaml:13:1 kl_loss_penalty"),
        ("", ["kl_loss_penalty=k1"], "command line kl_loss_penalty"),
        (VANILLA, [], ""),
        (VANILLA, ["ppo_epochs=2"], "run.yaml:13:1 pg_variant"),
        (VANILLA, [HALVES], "run.yaml:13:1 pg_variant"),
        ("", [HALVES, "ppo_epochs=2"], ""),
        ("", ["actor_infer.generating_args.top_p=0.9"], "command line actor_infer.generating_args.top_p"),
        ("", ["actor_infer.generating_args.top_k=-1"], ""),
        ("", ["actor_infer.generating_args.top_k=20"], "command line actor_infer.generating_args.top_k"),
        ("", ["actor_infer.generating_args.min_p=0.1"], "command line actor_infer.generating_args.min_p"),
        (
            "",
            ["actor_infer.generating_args.min_new_tokens=2"],
            "command line actor_infer.generating_args.min_new_tokens",
        ),
        (
            "",
            ["actor_infer.generating_args.repetition_penalty=1.1"],
            "command line actor_infer.generating_args.repetition_penalty",
        ),
        ("", [f"{ARGS}.learning_rate=1e-3"], ""),
        ("", [f"{ARGS}.learning_rate=0.002"], f"command line {ARGS}.learning_rate"),
        ("", [SCRATCH, f"{ARGS}.learning_rate=0.004"], ""),
        ("", [SCRATCH, f"{ARGS}.learning_rate=0.02"], f"command line {ARGS}.learning_rate"),
        ("", [f"{ARGS}.per_device_train_batch_size=2"], ""),
        ("", [f"{ARGS}.per_device_train_batch_size=1"], f"run.yaml:7:3 {ARGS}.gradient_accumulation_steps"),
        ("pg_variant: gspo\n", [], ""),
        ("pg_variant: gspo\npg_clip: 0.1\n", [], "run.yaml:14:1 pg_clip"),
        ("pg_variant: gspo\nloss_agg_mode: token-mean\n", [], "run.yaml:14:1 loss_agg_mode"),
        ("pg_variant: clip_cov\npg_clip: 0.1\n", [], ""),
        ("pg_variant: dppo\n", [], ""),
        ("pg_variant: dppo\n", ["train_infer_correction.is_weight.enabled=true"], "run.yaml:13:1 pg_variant"),
        ("pg_variant: dppo\n", ["logprob_temperature=0.5"], "command line logprob_temperature"),
        ("pg_variant: ppo\n", ["logprob_temperature=0.5"], ""),
        ("pg_variant: kl_cov\n", [], "run.yaml:13:1 pg_variant"),
        ("pg_variant: kl_cov\n", ["ppo_epochs=2"], ""),
        ("pg_variant: raft_plus_plus\n", [], "run.yaml:13:1 pg_variant"),
        (
            "pg_variant: raft_plus_plus\n",
            ["adv_estimator=reinforce", "norm_mean_type=group"],
            "run.yaml:13:1 pg_variant",
        ),
        ("pg_variant: raft_plus_plus\n", ["adv_estimator=reinforce"], ""),
        (
            "pg_variant: raft_plus_plus\n",
            ["adv_estimator=reinforce", "dual_clip=3"],
            "command line dual_clip",
        ),
        (
            "pg_variant: vanilla\n",
            [*AHEAD, "train_infer_correction.is_weight.enabled=false"],
            "run.yaml:13:1 pg_variant",
        ),
        ("pg_variant: vanilla\n", AHEAD, ""),
        ("pg_variant: cispo\n", ["pg_options={clip_high: 0.28}"], "command line pg_options.clip_high"),
        ("pg_variant: cispo\n", ["pg_options={clip_high: 0.28, clip_low: 0.2, bounds: relative}"], ""),
        ("pg_clip_high: 0.28\n", [], ""),
        ("pg_clip_high: 0.28\n", ["use_pg_clip_range=true"], ""),
        ("pg_clip: 0.1\n", ["use_pg_clip_range=true"], "run.yaml:13:1 pg_clip"),
        ("dual_clip: 2.0\n", [], ""),
        ("pg_clip: 0.1\n", ["pg_clip_low=0.2"], ""),
        ("pg_clip: 0.1\n", ["pg_clip_low=0.2", "pg_clip_high=0.3"], "run.yaml:13:1 pg_clip"),
        ("init_kl_coef: 0.1\n", [], "run.yaml:13:1 init_kl_coef"),
        ("kl_horizon: 100\n", [], "run.yaml:13:1 kl_horizon"),
        ("value_clip: 0.2\n", [], "run.yaml:13:1 value_clip"),
        ("entropy_coef_max: 0.1\n", [], "run.yaml:13:1 entropy_coef_max"),
        ("difficulty_low_threshold: 0.1\n", [], "run.yaml:13:1 difficulty_low_threshold"),
        ("max_additional_running_prompts: 4\n", [], "run.yaml:13:1 max_additional_running_prompts"),
        ("max_additional_running_prompts: 4\n", ["is_use_additional_prompts=true"], ""),
        ("kl_loss_coef: 0.0\n", [], "run.yaml:13:1 kl_loss_coef"),
        ("init_kl_coef: 0.0\n", ["use_kl_loss=false", "add_token_level_kl=true"], "run.yaml:13:1 init_kl_coef"),
        ("critic_warmup: 2\n", [], "run.yaml:13:1 critic_warmup"),
        ("", ["actor_infer.generating_args.temperature=0"], "command line actor_infer.generating_args.temperature"),
        ("adv_estimator: max_rl\n", [], ""),
        ("adv_estimator: max_rl\n", ["soft_overlong_penalty={l_cache: 8}"], "run.yaml:13:1 adv_estimator"),
        ("adv_estimator: remax\n", [], ""),
        ("error_max_len_clip: true\n", [], ""),
        ("error_max_len_clip: true\n", ["rewards.math.weight=0.5"], "run.yaml:13:1 error_max_len_clip"),
        ("error_max_len_clip: true\n", ["rewards.math.weight=0.5", "error_max_len_reward=0.5"], ""),
        (MASK, [], ""),
        (MASK, [FUNCTION], "run.yaml:13:1 difficulty_mask"),
        (MASK, ["rewards.math.weight=2"], "run.yaml:13:1 difficulty_mask"),
        (MASK, [FUNCTION, "difficulty_low_threshold=-1.0"], ""),
        (MASK, [FUNCTION, "difficulty_mask=false"], ""),
        ("", [MEAN_FILTER], ""),
        ("", [FUNCTION, MEAN_FILTER], "command line rewards.math.query_filter_config.type"),
        ("", [FUNCTION, MEAN_FILTER, "rewards.math.query_filter_config.filter_args.threshold_down=-1.0"], ""),
        ("", [FUNCTION, "rewards.math.query_filter_config.type=std_filter"], ""),
    ],
)
def test_a_warning_stands_where_its_key_is_written(added, overrides, warned):
    Path("run.yaml").write_text(CONFIG + added, encoding="utf-8")
    loaded = load("run.yaml", overrides, REGISTRY)
    assert [f"{each.where} {each.key}" for each in loaded.warnings] == ([warned] if warned else [])
    assert all(each.message for each in loaded.warnings)


def test_check_prints_every_warning_and_the_config_is_good(capsys):
    Path("run.yaml").write_text(CONFIG + K1 + VANILLA + MASK, encoding="utf-8")
    assert cli.main(["check", "--no-files", "run.yaml", "ppo_epochs=2", FUNCTION]) == 0
    shown = capsys.readouterr()
    assert mentions(shown.out, "run.yaml: ok:", "rlvr")
    assert [line.split(": ")[:3] for line in shown.err.splitlines()] == [
        ["run.yaml:13:1", "warning", "ROLL-C050 kl_loss_penalty"],
        ["run.yaml:14:1", "warning", "ROLL-C050 pg_variant"],
        ["run.yaml:15:1", "warning", "ROLL-C050 difficulty_mask"],
    ]


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["top_entropy_quantile=0.2", "force_disable_old_logprobs_recompute=true"], "top_entropy_quantile"),
        (["entropy_target=0.5", "entropy_loss_coef=2.0"], "entropy_loss_coef"),
        (["entropy_target=0.5", "entropy_coef_min=0.5", "entropy_loss_coef=0.1"], "entropy_loss_coef"),
    ],
)
def test_entropy_keys_that_contradict_each_other_are_mistakes(overrides, key):
    Path("run.yaml").write_text(CONFIG, encoding="utf-8")
    with raises_error(ConfigError, key) as found:
        load("run.yaml", overrides, REGISTRY)
    assert [(each.where, each.code) for each in found.value.problems] == [("command line", "ROLL-C014")]


MINIMAL = """\
pipeline: rlvr
pretrain: Qwen/Qwen3-0.6B
actor_train:
  data_args: {file_name: rows.jsonl}
  strategy_args: {strategy_name: hf_train}
actor_infer: {strategy_args: {strategy_name: hf_infer}}
rewards:
  math: {reward: math_rule}
"""


@pytest.mark.parametrize(
    ("overrides", "number", "warns"),
    [
        ([], 1, False),
        (["rollout_batch_size=3", "num_return_sequences_in_group=2"], 1, False),
        (["ppo_epochs=2"], 2, False),
        ([f"{ARGS}.gradient_accumulation_steps=32"], 4, False),
        ([f"{ARGS}.per_device_train_batch_size=8"], 128, True),
        (["actor_train.device_mapping=[0,1]", f"{ARGS}.per_device_train_batch_size=64"], 8, False),
    ],
)
def test_check_prints_the_optimizer_steps_of_a_batch(folder, capsys, overrides, number, warns):
    (folder / "run.yaml").write_text(MINIMAL)
    assert cli.main(["check", "--no-files", "run.yaml", *overrides]) == 0
    screen = capsys.readouterr()
    assert mentions(screen.out.split(";")[1], str(number))
    assert mentions(screen.err, "ROLL-C050", "gradient_accumulation_steps") == warns


def test_learning_rates_suit_the_pipeline(folder):
    (folder / "run.yaml").write_text(MINIMAL)
    critic = ["adv_estimator=gae", "critic={strategy_args: {strategy_name: hf_train}}"]
    config = load("run.yaml", critic, REGISTRY).config
    rates = {name: getattr(config, name).training_args.learning_rate for name in ("actor_train", "critic")}
    assert rates == {"actor_train": 1e-6, "critic": 1e-5}
    # A run's resolved config gives the same run.
    assert load(config, [], REGISTRY).config == config
    assert load("run.yaml", [f"{ARGS}.learning_rate=5e-5"], REGISTRY).config.actor_train.training_args == (
        config.actor_train.training_args.model_copy(update={"learning_rate": 5e-5})
    )


@pytest.mark.parametrize("overrides", [["2"], ["1"], ["2", "max_steps=10"]])
def test_epochs_that_nothing_reads_are_refused(folder, overrides):
    (folder / "run.yaml").write_text(MINIMAL)
    epochs, *others = overrides
    with raises_error(ConfigError, "num_train_epochs", "max_steps"):
        load("run.yaml", [f"{ARGS}.num_train_epochs={epochs}", *others], REGISTRY)


@pytest.mark.parametrize("key", ["num_train_epochs", "num_epochs", "epochs"])
def test_hints_for_epochs_name_what_the_pipeline_reads(folder, key):
    (folder / "run.yaml").write_text(f"{MINIMAL}{key}: 2\n")
    with raises_error(ConfigError, key, "max_steps") as raised:
        load("run.yaml", [], REGISTRY)
    assert "training_args" not in str(raised.value)
    sft = "pipeline: sft\nsft_train: {data_args: {file_name: rows.jsonl}, strategy_args: {strategy_name: hf_train}}\n"
    (folder / "sft.yaml").write_text(f"{sft}{key}: 2\n")
    with raises_error(ConfigError, key, "sft_train.training_args"):
        load("sft.yaml", [], REGISTRY)


@pytest.mark.parametrize(
    ("given", "clip_range", "dual_clip"),
    [
        ("", (0.2, 0.2), None),
        ("pg_clip: 0.1\npg_clip_high: 0.28\n", (0.1, 0.28), None),
        ("use_pg_clip_range: true\npg_clip: 0.1\n", (0.2, 0.2), None),
        ("use_pg_clip_range: true\npg_clip_high: 0.28\n", (0.2, 0.28), None),
        ("use_pg_clip_range: false\npg_clip: 0.1\npg_clip_high: 0.28\n", (0.1, 0.1), None),
        ("dual_clip_loss: true\n", (0.2, 0.2), 3.0),
        ("dual_clip_loss: true\ndual_clip: 2.0\n", (0.2, 0.2), 2.0),
        ("dual_clip_loss: false\ndual_clip: 2.0\n", (0.2, 0.2), None),
    ],
)
def test_switches_of_roll_set_or_remove_their_keys(folder, given, clip_range, dual_clip):
    (folder / "run.yaml").write_text(CONFIG + given)
    config = load(folder / "run.yaml", [], REGISTRY).config
    assert (config.clip_range(), config.dual_clip) == (clip_range, dual_clip)


def test_a_switch_that_is_no_boolean_is_an_unknown_key(folder):
    (folder / "run.yaml").write_text(CONFIG + "dual_clip_loss: often\n")
    with raises_error("ROLL-C010", "dual_clip", key="dual_clip_loss"):
        load(folder / "run.yaml", [], REGISTRY)


def test_latest_resolves_unless_an_earlier_run_moves_it(folder):
    (folder / "out/taught/001/export").mkdir(parents=True)
    (folder / "out/taught/latest").symlink_to("001")
    (folder / "latest").mkdir()
    (folder / "run.yaml").write_text(CONFIG + "pretrain: out/taught/latest/export\nexp_name: latest\n")

    def loaded(*written):
        return load(folder / "run.yaml", [], REGISTRY, written=written).config

    assert loaded().pretrain == str(folder / "out/taught/001/export")
    assert loaded().exp_name == "latest", "a folder, no link"
    assert loaded(Path("out/taught")).pretrain == "out/taught/latest/export"
    assert loaded(Path("out/other")).pretrain == str(folder / "out/taught/001/export")


def test_a_run_reads_what_an_earlier_run_of_the_command_writes(folder):
    (folder / "out/taught/001/export").mkdir(parents=True)
    (folder / "out/taught/latest").symlink_to("001")
    first, second = folder / "first.yaml", folder / "second.yaml"
    first.write_text(CONFIG + "output_dir: out\nexp_name: taught\n")
    second.write_text(CONFIG + "pretrain: out/taught/latest/export\noutput_dir: out\nexp_name: after\n")
    _, after = prepare([first, second], [], load_registry(), files=False)
    assert after.config.pretrain == "out/taught/latest/export"
    (alone,) = prepare([second], [], load_registry(), files=False)
    assert alone.config.pretrain == str(folder / "out/taught/001/export")
