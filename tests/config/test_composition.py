"""Fragments, overrides and interpolations: what comes out, and that nothing stays behind."""

import os
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra
from omegaconf import Container, OmegaConf

from roll_core.config import load
from roll_core.config.compose import compose
from roll_core.errors import ConfigError
from roll_core.plugins.registry import load_registry
from roll_testing.errors import mentions, raises_error

REGISTRY = load_registry()
SFT = """\
pipeline: sft
sft_train:
  data_args: {file_name: rows.jsonl}
  strategy_args: {strategy_name: hf_train}
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write files into the folder that the test works in."""
    monkeypatch.chdir(tmp_path)

    def write(**files):
        for name, text in files.items():
            file = tmp_path / f"{name.replace('__', '/')}.yaml"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        return Path(f"{next(iter(files)).replace('__', '/')}.yaml")

    return write


def test_a_plain_file_is_read_without_hydra_or_omegaconf(write):
    file = write(run=SFT)
    script = (
        "import sys; from roll_core.config import load; from roll_core.plugins.registry import load_registry;"
        f"load({str(file)!r}, [], load_registry()); print([m for m in ('hydra', 'omegaconf') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_sources_are_all_files_that_were_read(write):
    file = write(run="defaults: [one, _self_]\n" + SFT, one="defaults: [two]\n", two="seed: 1\n")
    loaded = load(file, [], REGISTRY)
    assert loaded.sources[0] == file
    assert {path.name for path in loaded.sources} == {"run.yaml", "one.yaml", "two.yaml"}
    assert loaded.pipeline.name == "sft"


def test_neighbouring_fragment_is_merged_at_the_top_as_in_roll(write):
    file = write(
        agentic__run="defaults:\n  - ../config/envs@_here_\n" + SFT + "hydra: {run: {dir: .}, output_subdir: null}\n",
        config__envs="seed: 11\n",
    )
    assert load(file, [], REGISTRY).config.seed == 11


def test_errors_in_a_fragment_of_a_role_are_located(write):
    file = write(run="defaults: [adam@sft_train.training_args]\n" + SFT, adam="learning_rate: 0.25\nadam_beta1: 0.5\n")
    assert load(file, [], REGISTRY).config.sft_train.training_args.learning_rate == 0.25
    Path("adam.yaml").write_text("learning_rate: 0.25\n\nadam_beta1: 2\n")
    with raises_error(ConfigError, "adam.yaml:3", "13", "sft_train.training_args.adam_beta1", "2"):
        load(file, [], REGISTRY)


def test_a_group_is_chosen_on_the_command_line(write):
    file = write(
        run="defaults: [size: small, _self_]\n" + SFT,
        size__small="# @package _global_\nseed: 1\n",
        size__large="# @package _global_\nseed: 100\n",
    )
    assert load(file, [], REGISTRY).config.seed == 1
    assert load(file, ["size=large", "save_steps=9"], REGISTRY).config.seed == 100
    assert load(file, {"size": "large"}, REGISTRY).config.seed == 100


@pytest.mark.parametrize("overrides", [["size@_global_={seed: 7}"], {"size@_global_": {"seed": 7}}])
def test_a_mapping_is_no_choice_of_a_fragment_and_is_not_lost(write, overrides):
    file = write(run="defaults: [size@_global_: small, _self_]\n" + SFT, size__small="seed: 1\n")
    with pytest.raises(ConfigError) as raised:
        load(file, overrides, REGISTRY)
    (problem,) = raised.value.problems
    assert problem.where == "command line"


@pytest.mark.parametrize("stanza", ["hydra: {run: {dir: .}, output_subdir: null}\n", "hydra: {nonsense: 1}\n"])
def test_a_hydra_stanza_of_a_plain_file_is_dropped(write, stanza):
    assert load(write(run=SFT + stanza), [], REGISTRY).config.pipeline == "sft"
    assert load(write(run=SFT + stanza), ["seed=5"], REGISTRY).config.seed == 5


@pytest.mark.parametrize(
    ("override", "seed", "rate"),
    [
        ("seed=5", 5, 5e-5),
        ("+seed=5", 5, 5e-5),
        ("++seed=5", 5, 5e-5),
        ("sft_train.training_args.learning_rate=1e-6", 42, 1e-6),
        ("sft_train.training_args={learning_rate: 0.5}", 42, 0.5),
    ],
)
def test_an_override_sets_a_key_that_the_file_does_not_have(write, override, seed, rate):
    config = load(write(run=SFT), [override], REGISTRY).config
    assert (config.seed, config.sft_train.training_args.learning_rate) == (seed, rate)


def test_an_override_removes_a_key(write):
    assert load(write(run=SFT + "seed: 3\n"), ["~seed"], REGISTRY).config.seed == 42


@pytest.mark.parametrize(("value", "remains"), [("3", 42), ("4", None), ("null", 42)])
def test_override_with_a_value_removes_only_that_value(write, value, remains):
    file = write(run=SFT + "seed: 3\n")
    if remains is None:
        with raises_error(ConfigError, "ROLL-C025", f"~seed={value}", "seed", value):
            load(file, [f"~seed={value}"], REGISTRY)
    else:
        assert load(file, [f"~seed={value}"], REGISTRY).config.seed == remains


def test_an_override_may_refer_to_another_key(write):
    assert load(write(run=SFT + "seed: 3\n"), ["save_steps=${seed}"], REGISTRY).config.save_steps == 3


@pytest.mark.parametrize("mapping", ["list(range(0,4))", "range(0,4)", "[0,1,2,3]", "[0,1]+list(range(2,4))"])
def test_slots_are_overridden_without_quotes(write, mapping):
    config = load(write(run=SFT), [f"sft_train.device_mapping={mapping}"], REGISTRY).config
    assert config.sft_train.device_mapping == (0, 1, 2, 3)


def test_interpolations_return_numbers_mappings_and_environment(write, monkeypatch):
    monkeypatch.setenv("ROLL_TEST_FOLDER", "runs")
    file = write(
        run=SFT
        + "seed: 3\nsave_steps: ${seed}\nexp_name: run-${seed}\noutput_dir: ${oc.env:ROLL_TEST_FOLDER}\n"
        + "val_batch_size: ${oc.decode:'12'}\n"
        + "validation: {data_args: '${sft_train.data_args}'}\n"
    )
    config = load(file, [], REGISTRY).config
    assert (config.save_steps, config.exp_name, config.output_dir, config.val_batch_size) == (3, "run-3", "runs", 12)
    assert config.validation.data_args == config.sft_train.data_args


def test_loading_leaves_nothing_behind(write):
    file = write(run="defaults: [one, _self_]\nsave_steps: ${seed}\n" + SFT, one="seed: 1\n")
    before = (os.getcwd(), sorted(os.listdir()), dict(os.environ))
    load(file, ["seed=4"], REGISTRY)
    assert (os.getcwd(), sorted(os.listdir()), dict(os.environ)) == before
    assert not GlobalHydra.instance().is_initialized()


def test_loading_inside_hydra_keeps_its_state(write, tmp_path):
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir

    file = write(run="defaults: [one, _self_]\n" + SFT, one="seed: 1\n")
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        load(file, [], REGISTRY)
        assert hydra_compose("one").seed == 1
    assert not GlobalHydra.instance().is_initialized()


def test_a_mistake_through_an_interpolation_names_both_places(write):
    file = write(
        run="defaults: [one, _self_]\nlogging_steps: ${save_steps}\n" + SFT, one="# by default\nsave_steps: 0\n"
    )
    with pytest.raises(ConfigError) as raised:
        load(file, [], REGISTRY)
    (problem,) = raised.value.problems
    assert problem.where == "run.yaml:2:16"
    assert mentions(problem.message, "save_steps", "one.yaml:2", "13")


@pytest.mark.parametrize(
    "text",
    [
        "a: 1e-6\nb: 1.5e3\nc: .5\nd: -.inf\ne: 1_000\nf: 0x1F\ng: 017\nh: 1:30\ni: 1.\n",
        "a: yes\nb: off\nc: ~\nd: null\ne:\nf: ''\ng: 'null'\nh: 2026-01-01\ni: 12:30:45\n",
        "a: &x {b: [1, 2], c: {d: e}}\nf: *x\ng: {<<: *x, b: 3}\nh: [*x, {<<: [*x, {z: 1}]}]\n",
        'a: |\n  two\n  lines\nb: >-\n  folded\n  text\nc: "\\u00e9\\n"\n1: one\n2.5: two\n',
        "a: ! 12\nb: !!str 12\nc: !!int '3'\nd: !!float 3\n",
    ],
)
def test_yaml_means_what_it_means_to_omegaconf(write, text):
    theirs = OmegaConf.to_container(OmegaConf.load(write(run=text)))
    assert compose(Path("run.yaml"), (), REGISTRY).data == theirs


@pytest.mark.parametrize(
    ("files", "chosen"),
    [
        (
            {"run": "defaults: [a, _self_, b]\nx: {y: 1, z: [1, 2]}\n", "a": "x: {y: 0, w: 0}\n", "b": "x: {z: [3]}\n"},
            [],
        ),
        (
            {
                "run": "defaults: [a@x.y, a@z]\nx: {w: 2}\n",
                "a": "defaults: [b@_here_, b@inner]\nk: 1\n",
                "b": "k: 2\nm: 3\n",
            },
            [],
        ),
        ({"run": "defaults: [g: one]\n", "g__one": "k: 1\n", "g__two": "k: 2\n"}, ["g=two"]),
        ({"run": "defaults: [g@here: one]\n", "g__one": "# @package _global_\nk: 1\n", "g__two": "k: 2\n"}, []),
        ({"run": "defaults: [g: [one, two]]\n", "g__one": "k: 1\n", "g__two": "k: ${.l}\nl: 4\n"}, []),
        (
            {
                "run": "defaults: [g: one, {optional h: three}]\nk: 0\n",
                "g__one": "defaults: [two]\n",
                "g__two": "k: 2\n",
            },
            [],
        ),
    ],
)
def test_composition_is_what_hydra_composes(write, tmp_path, files, chosen):
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir

    ours = compose(write(**files), chosen, REGISTRY).data
    with initialize_config_dir(str(tmp_path), version_base="1.3"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Hydra warns of lists without _self_, of which some are
        theirs = OmegaConf.to_container(hydra_compose("run", chosen), resolve=True)
    assert ours == theirs


def test_override_inside_a_reference_changes_one_key(write):
    rows = SFT.replace("rows.jsonl}", "rows.jsonl, max_samples: 3}")
    file = write(run=rows + "validation: {data_args: '${sft_train.data_args}'}\n")
    config = load(file, ["validation.data_args.file_name=held.jsonl"], REGISTRY).config
    assert (config.validation.data_args.file_name, config.validation.data_args.max_samples) == ("held.jsonl", 3)
    assert config.sft_train.data_args.file_name == "rows.jsonl"


@pytest.mark.parametrize(
    ("fragment", "problem"),
    [
        ("seed: 1\ncaf\u00e9: 1\n", "base.yaml:2:4 ROLL-C021 "),
        ("seed: 1\nexp_name: ${\n", "base.yaml:2:11 ROLL-C024 exp_name"),
        ("defaults: [/more/rest]\n", "more/rest.yaml:1:12 ROLL-C023 defaults"),
    ],
)
def test_a_fragment_that_cannot_be_used_is_named_with_the_place(write, fragment, problem):
    file = write(run="defaults: [base, _self_]\n" + SFT, more__rest="defaults: [/base]\n")
    Path("base.yaml").write_bytes(fragment.encode("latin-1"))
    with pytest.raises(ConfigError) as raised:
        load(file, [], REGISTRY)
    assert [f"{each.where} {each.code} {each.key}" for each in raised.value.problems] == [problem]


def test_a_fragment_may_be_empty(write):
    file = write(
        run="defaults: [nothing, remarks, model: none, _self_]\n" + SFT,
        nothing="",
        remarks="# later\n---\n",
        model__none="",
    )
    composed = compose(file, (), REGISTRY)
    assert composed.data["pipeline"] == "sft"
    assert len(composed.files) == 4
    with pytest.raises(ConfigError):
        compose(Path("nothing.yaml"), (), REGISTRY)


def bomb(first, *, form):
    """Eight levels of ten references each."""
    levels = [f"bomb_0: {first}"]
    for level in range(1, 9):
        reference = f"${{bomb_{level - 1}}}"
        value = {
            "text": '"' + 10 * reference + '"',
            "list": "[" + ", ".join(10 * [f"'{reference}'"]) + "]",
            "mapping": "{" + ", ".join(f"k{i}: '{reference}'" for i in range(10)) + "}",
        }[form]
        levels.append(f"bomb_{level}: {value}")
    return "\n".join(levels) + "\n"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("form", ["text", "list", "mapping"])
def test_interpolations_that_multiply_are_refused(write, form):
    file = write(run=SFT + bomb("x", form=form))
    composed = compose(file, (), REGISTRY)
    (problem,) = [each for each in composed.problems if each.code == "ROLL-C024"]
    assert mentions(problem.where, "run.yaml")
    assert problem.key.startswith("bomb_")


def test_interpolations_that_repeat_a_long_text_are_refused(write):
    file = write(run=SFT + f"long: {50_000 * 'x'}\nname: {100 * '${long}'}\n")
    (problem,) = compose(file, (), REGISTRY).problems
    assert (problem.code, problem.key) == ("ROLL-C024", "name")


@pytest.mark.timeout(60)
def test_references_that_repeat_a_large_list_are_refused(write):
    lists = [
        f"large_0: &a0 [{', '.join(40 * 'x')}]",
        *(f"large_{i}: &a{i} [{', '.join(15 * [f'*a{i - 1}'])}]" for i in (1, 2)),
    ]
    references = ", ".join(100 * ["'${large_2}'"])
    file = write(run=SFT + "\n".join(lists) + f"\nname: [{references}]\n")
    (problem,) = compose(file, (), REGISTRY).problems
    assert (problem.code, problem.key) == ("ROLL-C024", "name.21")


def test_hundreds_of_interpolations_are_resolved(write):
    prompt = 800 * "word "
    names = "".join(f"name_{i}: '${{prompt}} ${{seed}}'\n" for i in range(300))
    composed = compose(write(run=f"{SFT}seed: 7\nprompt: {prompt}\n{names}"), (), REGISTRY)
    assert composed.problems == ()
    assert composed.data["name_299"] == f"{prompt.strip()} 7"


def test_threads_compose_at_the_same_time(write):
    original = Container.resolve_parse_tree
    file = write(run=SFT + bomb("x", form="list"), plain=SFT + "seed: 7\nname: ${seed}\n")
    plain = file.with_name("plain.yaml")
    with ThreadPoolExecutor(8) as threads:
        bombs = [threads.submit(compose, file, (), REGISTRY) for _ in range(2)]
        others = [threads.submit(compose, plain, (), REGISTRY) for _ in range(20)]
        direct = OmegaConf.create({"a": 1, "b": [*2_500 * ["${a}"]]})
        assert OmegaConf.to_container(direct, resolve=True)["b"] == 2_500 * [1]
        assert [len(each.result().problems) for each in bombs] == [1, 1]
        assert [each.result().data["name"] for each in others] == 20 * [7]
    assert Container.resolve_parse_tree is original


def test_an_interrupted_composition_restores_omegaconf(write):
    def interrupted():
        raise KeyboardInterrupt

    original = Container.resolve_parse_tree
    OmegaConf.register_new_resolver("interrupted", interrupted)
    try:
        with pytest.raises(KeyboardInterrupt):
            compose(write(run=SFT + "name: ${interrupted:}\n"), (), REGISTRY)
    finally:
        OmegaConf.clear_resolver("interrupted")
    assert Container.resolve_parse_tree is original


def test_a_bomb_in_an_override_is_refused(write):
    file = write(run=SFT + bomb("x", form="text"))
    with raises_error(ConfigError, "ROLL-C024"):
        load(file, ("exp_name=${bomb_8}",), registry=REGISTRY)


def test_file_of_another_directory_names_its_place(write):
    file = write(top="defaults: [runs/sft, _self_]\n", runs__sft=SFT)
    with raises_error(ConfigError, "runs/NAME@_here_"):
        load(file, [], REGISTRY)
    file = write(top="defaults: [runs/sft@_here_, _self_]\n")
    assert load(file, [], REGISTRY).config.pipeline == "sft"
