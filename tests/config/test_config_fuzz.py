"""Hundreds of damaged configs: each is refused in words, or accepted with nothing of it ignored.

ROLL_FUZZ_EXAMPLES=20000 for a longer search.
"""

import copy
import os
import string
import tempfile
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from roll_core.config import load
from roll_core.config.dump import dump
from roll_core.errors import ConfigError, PluginError
from roll_core.plugins.registry import load_registry

REGISTRY = load_registry()
FOLDER = tempfile.TemporaryDirectory()
EXAMPLES = int(os.environ.get("ROLL_FUZZ_EXAMPLES", "200"))
FUZZ = settings(
    max_examples=EXAMPLES,
    derandomize="ROLL_FUZZ_EXAMPLES" not in os.environ,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)

SFT = """\
pipeline: sft
exp_name: fuzz
seed: 7
max_steps: 3
system_envs: {OMP_NUM_THREADS: 1}
tokenizer: {kind: bpe, vocab_size: 300}
sft_train:
  model_args:
    dtype: fp32
    random_init: {model_type: qwen3, hidden_size: 64, tie_word_embeddings: true}
  training_args: {learning_rate: 1e-3, lr_scheduler_type: cosine, warmup_steps: 2}
  data_args: {file_name: [rows.jsonl], max_samples: 10}
  strategy_args: {strategy_name: hf_train, strategy_config: {}}
  device_mapping: list(range(0,4))
"""
RLVR = """\
pipeline: rlvr
rollout_batch_size: 16
num_return_sequences_in_group: 8
adv_estimator: grpo
use_kl_loss: true
track_with: [tensorboard]
actor_train:
  training_args: {learning_rate: 1e-6, gradient_accumulation_steps: 2}
  data_args: {file_name: prompts.jsonl, domain_interleave_probs: {math: 0.5, code: 0.5}}
  strategy_args: {strategy_name: hf_train}
  device_mapping: [0, 1]
actor_infer:
  generating_args: {temperature: 0.8, top_p: 0.9, stop_strings: ["###"]}
  strategy_args: {strategy_name: hf_infer}
  device_mapping: [0, 1]
reference: {strategy_args: {strategy_name: hf_infer}}
rewards:
  math: {reward: math_rule, weight: 2.0}
  code: {reward: function, function: "my.rewards:judge", tag_included: [code, python]}
validation: {data_args: {file_name: held_out.jsonl}}
guards: {}
"""
TEXTS = [SFT, RLVR]

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 20),
    st.sampled_from([1e300, -0.5, float("inf"), float("nan"), 10**30]),
    st.sampled_from(
        ["", "sft", "hf_train", "hf_infer", "1e-5", "${seed}", "${nope}", "list(range(0,2))", "???", "yes"]
    ),
    st.text(alphabet=string.printable, max_size=6),
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.one_of(st.text(max_size=5), st.integers()), inner, max_size=3)
    ),
    max_leaves=4,
)


def paths(tree, prefix=()):
    """Every path of a tree, its root left out."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, each in items:
        yield (*prefix, key)
        yield from paths(each, (*prefix, key))


def parent_of(tree, path):
    for step in path[:-1]:
        tree = tree[step]
    return tree


@st.composite
def damaged_trees(draw):
    """A good config in which one to three things were changed, added, renamed, moved or removed."""
    tree = copy.deepcopy(yaml.safe_load(draw(st.sampled_from(TEXTS)).replace("1e-", "1.0e-")))
    for _ in range(draw(st.integers(1, 3))):
        places = list(paths(tree))
        if not places:
            break
        path = draw(st.sampled_from(places))
        parent, key = parent_of(tree, path), path[-1]
        change = draw(st.sampled_from(["replace", "remove", "rename", "add", "move"]))
        if change == "replace":
            parent[key] = draw(values)
        elif change == "remove":
            del parent[key]
        elif isinstance(parent, dict):
            if change == "rename" and isinstance(key, str) and key:
                at = draw(st.integers(0, len(key) - 1))
                parent[key[:at] + draw(st.sampled_from(string.ascii_lowercase)) + key[at + 1 :]] = parent.pop(key)
            elif change == "add":
                parent[draw(st.text(alphabet=string.ascii_letters, min_size=1, max_size=8))] = draw(values)
            elif change == "move":
                tree[str(key)] = parent.pop(key)
    return tree


def load_text(text: str, overrides=()):
    """The loaded config, or None where it was refused in words."""
    file = Path(FOLDER.name, "run.yaml")
    file.write_text(text, encoding="utf-8", errors="surrogatepass")
    try:
        return load(file, overrides, REGISTRY).config
    except (ConfigError, PluginError) as error:
        refusal = error
    assert str(refusal)
    assert "Traceback" not in str(refusal)
    if isinstance(refusal, ConfigError):
        assert refusal.problems
        assert all(problem.where and problem.message for problem in refusal.problems)
    return None


def assert_nothing_ignored(written, loaded, path=()):
    """Every key that was written is in the loaded config."""
    if isinstance(written, dict):
        assert isinstance(loaded, dict), path
        for key, each in written.items():
            assert key in loaded, (*path, key)
            assert_nothing_ignored(each, loaded[key], (*path, key))


def assert_survives_saving(config):
    """What was loaded is the same after saving; what was refused is None."""
    assert config is None or load_text(dump(config)) == config


def test_the_undamaged_configs_are_good():
    for text in TEXTS:
        assert load_text(text) is not None


@pytest.mark.slow  # `test_saved_config_loads_equal` has a tenth of these trees
@settings(FUZZ, max_examples=5 * EXAMPLES)
@given(tree=damaged_trees())
def test_a_damaged_tree_is_refused_in_words_or_kept_whole(tree):
    config = load_text(yaml.safe_dump(tree, allow_unicode=True))
    if config is not None and "${" not in str(tree):
        assert_nothing_ignored(tree, config.model_dump(mode="python", serialize_as_any=True))


@FUZZ
@given(data=st.data())
def test_damaged_text_is_refused_in_words_or_kept_whole(data):
    lines = data.draw(st.sampled_from(TEXTS)).splitlines()
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(lines) - 1))
        change = data.draw(st.sampled_from(["drop", "double", "insert", "indent", "cut", "swap"]))
        if change == "drop" and len(lines) > 1:
            del lines[at]
        elif change == "double":
            lines.insert(at, lines[at])
        elif change == "insert":
            column = data.draw(st.integers(0, len(lines[at])))
            lines[at] = lines[at][:column] + data.draw(st.text(min_size=1, max_size=3)) + lines[at][column:]
        elif change == "indent":
            lines[at] = (
                data.draw(st.sampled_from([" ", "  ", "\t", "- ", "? ", "&a ", "*a", "!!int ", "<<: "])) + lines[at]
            )
        elif change == "cut":
            lines[at] = lines[at][: data.draw(st.integers(0, len(lines[at])))]
        else:
            other = data.draw(st.integers(0, len(lines) - 1))
            lines[at], lines[other] = lines[other], lines[at]
    assert_survives_saving(load_text("\n".join(lines) + "\n"))


@FUZZ
@given(content=st.text(max_size=60))
def test_any_text_is_refused_in_words(content):
    assert load_text(content) is None


@settings(FUZZ, max_examples=EXAMPLES // 4)
@given(
    override=st.one_of(
        st.text(max_size=20),
        st.builds(
            "{}={}".format,
            st.sampled_from(
                ["seed", "+seed", "++x", "~seed", "sft_train.training_args.learning_rate", "a.b[0]", "a@b", "a/b"]
            ),
            st.text(max_size=12),
        ),
    )
)
def test_any_override_is_refused_in_words_or_done(override):
    assert_survives_saving(load_text(SFT, [override]))


@settings(FUZZ, max_examples=EXAMPLES // 20)
@given(entries=st.lists(values, max_size=3), inside=values)
def test_any_defaults_list_is_refused_in_words_or_composed(entries, inside):
    head = yaml.safe_dump({"defaults": entries, "x": inside}, allow_unicode=True)
    assert_survives_saving(load_text(head + SFT))


@settings(FUZZ, max_examples=EXAMPLES // 2)
@given(tree=damaged_trees())
def test_saved_config_loads_equal(tree):
    assert_survives_saving(load_text(yaml.safe_dump(tree, allow_unicode=True)))


free_text = st.text(alphabet=st.characters(exclude_categories=["Cs", "Cc"]), max_size=12) | st.sampled_from(
    [
        "1e-6",
        "yes",
        "null",
        "~",
        "0x10",
        "1_000",
        "1:30",
        "2026-01-01",
        "a: b",
        "# x",
        "- x",
        "${x}",
        "\\${x}",
        "\\\\",
        "$",
        "=",
        "<<",
        "${",
        "a\\",
    ]
)


@settings(FUZZ, max_examples=EXAMPLES // 2)
@given(
    envs=st.dictionaries(st.text(string.ascii_uppercase, min_size=1, max_size=5), free_text, max_size=3),
    init=st.dictionaries(
        free_text.filter(lambda key: key != "<<"),
        st.one_of(
            free_text,
            st.integers(),
            st.floats(allow_nan=False),
            st.booleans(),
            st.none(),
            st.lists(free_text, max_size=2),
        ),
        max_size=3,
    ),
    rate=st.floats(0, 1e6),
    output=free_text,
)
def test_any_free_value_survives_saving(envs, init, rate, output):
    base = load_text(SFT)
    train = base.sft_train
    model = train.model_args.model_copy(update={"random_init": {"model_type": "qwen3", **init}})
    training = train.training_args.model_copy(update={"learning_rate": rate})
    config = base.model_copy(
        update={
            "output_dir": output,
            "system_envs": envs,
            "sft_train": train.model_copy(update={"model_args": model, "training_args": training}),
        }
    )
    assert load_text(dump(config)) == config


@pytest.mark.parametrize("text", TEXTS)
def test_saving_twice_gives_the_same_text(text):
    config = load_text(text)
    assert dump(load_text(dump(config))) == dump(config)
