"""Arguments of the commands. The function that a command calls is imported after its arguments are parsed."""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll_core.cli.arguments import command_parser, parse_configs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roll_core.plugins.registry import Registry


def plan(words: Sequence[str], registry: Registry) -> int:
    """Show placement and memory of a run, without starting it."""
    parser = command_parser(
        "plan",
        "Show the placement of workers and the memory of each role in each phase, without starting a run. The exit code"
        " is 1 if the run could not start or would not fit in memory.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("-v", "--verbose", action="store_true", help="also print the formula of each amount")
    parser.add_argument("--nodes", metavar="N", type=_count, help="number of nodes (default: only this host)")
    parser.add_argument("--slot-memory", metavar="GIB", type=_amount, help="free memory of a slot (default: measured)")
    parser.add_argument("--host-memory", metavar="GIB", type=_amount, help="free memory of a host (default: measured)")
    parser.add_argument("--no-files", action="store_true", help="as for check; a plan never checks these files")
    configs, overrides, options = parse_configs(parser, words)
    if len(configs) != 1:
        parser.error("expected one config file")
    from roll_tools.plan import show_plan

    return show_plan(
        configs[0],
        overrides,
        registry,
        nodes=options.nodes,
        slot_gib=options.slot_memory,
        host_gib=options.host_memory,
        as_json=options.json,
        verbose=options.verbose,
    )


def init(words: Sequence[str], registry: Registry) -> int:
    """Write a first run. Asks for missing arguments on a terminal."""
    parser = command_parser(
        "init",
        "Write a first run: a commented config, a sample of data, and a reward to edit. It trains a small model with"
        " random weights on a CPU and downloads nothing. Asks for missing arguments on a terminal.",
    )
    parser.epilog = "example: roll-core init rlvr first"
    parser.add_argument("kind", metavar="KIND", nargs="?", help="sft, rlvr, preference, distill, agentic, diffusion, …")
    parser.add_argument("dir", metavar="DIR", type=Path, nargs="?", help="folder to write; no file is overwritten")
    options = parser.parse_intermixed_args(words)
    if options.dir is None and not (sys.stdin.isatty() and sys.stdout.isatty()):
        parser.error("expected KIND and DIR, such as: rlvr first")
    from roll_tools.init import write_starter

    try:
        return write_starter(options.kind, options.dir, registry)
    except EOFError:  # Ctrl-D at a question
        raise KeyboardInterrupt from None


def doctor(words: Sequence[str], registry: Registry) -> int:
    """Check this machine, its software and its devices, and what a config needs of them."""
    if words[:1] == ["mismatch"]:
        return _mismatch(words[1:], registry)
    parser = command_parser(
        "doctor",
        "Check this machine, its software and its devices, and what a config needs of them. Changes nothing. The exit"
        " code is 1 if there is an error. `roll-core doctor mismatch` examines why engine and trainer disagree.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    configs, overrides, options = parse_configs(parser, words)
    if len(configs) > 1 or (overrides and not configs):
        parser.error("expected at most one config file, and key=value only with it")
    from roll_tools.doctor import show_findings

    return show_findings(configs[0] if configs else None, overrides, registry, as_json=options.json)


def _mismatch(words: Sequence[str], registry: Registry) -> int:
    parser = command_parser(
        "doctor mismatch",
        "Name the causes why engine and trainer give the same tokens different logprobs. Of a run: from its recorded"
        " logprobs, without a model. Of a config: builds both and measures. The exit code is 1 if the gap exceeds the"
        " threshold.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--step", metavar="N", type=_count, help="step of the run (default: the last recorded one)")
    parser.add_argument("--engine", metavar="NAME", help="compare with this engine instead of the config's")
    parser.add_argument(
        "--threshold", metavar="NATS", type=_amount, help="largest accepted gap (default: the noise of the dtypes)"
    )
    sources, overrides, options = parse_configs(parser, words)
    if len(sources) != 1:
        parser.error("expected one config, or one run")
    from roll_tools.mismatch import show_mismatch

    return show_mismatch(
        sources[0],
        overrides,
        registry,
        step=options.step,
        engine=options.engine,
        threshold=options.threshold,
        as_json=options.json,
    )


def audit(words: Sequence[str], registry: Registry) -> int:
    """Check what rows, tokenizer and chat template do to the tokens of a run, and show which tokens are trained."""
    parser = command_parser(
        "audit",
        "Check what rows, tokenizer and chat template do to the tokens of a run, and show which tokens are trained. The"
        " exit code is 1 if there is an error.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--tokenizer", metavar="MODEL", help="directory or hub id; only with a file of rows")
    parser.add_argument("--rows", metavar="N", type=_count, default=2, help="number of rows to show (default: 2)")
    from roll_core.data.rows import is_hub_name

    names = [word for word in words if is_hub_name(word)]
    sources, overrides, options = parse_configs(parser, [word for word in words if word not in names])
    if len(names) + len(sources) != 1:
        parser.error("expected one config, or one file of rows")
    from roll_tools.audit import show_audit

    source = names[0] if names else sources[0]
    return show_audit(
        source, overrides, registry, tokenizer=options.tokenizer, num_shown=options.rows, as_json=options.json
    )


def evaluate(words: Sequence[str], registry: Registry) -> int:
    """Score models on held-out prompts. Several models are compared on one page."""
    parser = command_parser(
        "eval",
        "Score models on the held-out prompts of a config: one of pipeline evaluate, or of a training run with"
        " validation. Each model has a run of its own. Several are compared on one page, with paired differences.",
    )
    parser.epilog = "example: roll-core eval output/grpo/latest Qwen/Qwen3-8B grpo.yaml"
    parser.add_argument(
        "words", metavar="MODEL | CONFIG | key=value", nargs="*",
        help="models (directory, hub id, run or checkpoint), one config, and overrides of its keys",
    )  # fmt: skip
    parser.add_argument("--no-files", action="store_true", help="do not check models, rows and reward functions")
    parser.add_argument(
        "-o", "--out", metavar="FILE", type=Path, help="page that compares several models (default: comparison.html)"
    )
    parser.add_argument(
        "--harness",
        choices=["lm_eval", "inspect_ai"],
        help="score by tasks of lm-evaluation-harness or Inspect, which call the engine, instead of prompts",
    )
    parser.add_argument("--tasks", metavar="TASK,…", help="names or files of the harness's tasks")
    options = parser.parse_intermixed_args(words)
    if bool(options.harness) != bool(options.tasks):
        parser.error("--harness and --tasks belong together, such as: --harness lm_eval --tasks gsm8k")
    models, configs, overrides = _models_and_configs(options.words)
    if len(configs) != 1 or not models:
        parser.error("expected at least one model, and one config file")
    if options.out and len(models) == 1:
        parser.error("-o only with several models: the report of one is in the directory of its run")
    from roll_core.cli.main import stop_signals

    with stop_signals():
        from roll_core.cli.run import run_loaded
        from roll_tools.evaluation import evaluations

        loaded = evaluations(
            models,
            configs[0],
            overrides,
            registry,
            files=not options.no_files,
            harness=options.harness or "",
            tasks=(options.tasks or "").split(","),
        )
        results = run_loaded(loaded, registry)
    if len(results) > 1:
        from roll_tools.comparison import write_comparison

        page = write_comparison([result.run_dir for result in results], options.out or Path("comparison.html"))
        sys.stdout.write(f"{page}\n")
    return results[-1].exit_code


def _models_and_configs(words: Sequence[str]) -> tuple[list[str], list[Path], list[str]]:
    """Models, configs and overrides among words in any order."""
    configs = [Path(word) for word in words if Path(word).is_file()]
    others = [word for word in words if not Path(word).is_file()]
    overrides = [word for word in others if "=" in word or word.startswith("~")]
    return [word for word in others if word not in overrides], configs, overrides


def filter_rows(words: Sequence[str], registry: Registry) -> int:
    """Measure the pass rate of the rows of a config, and write those in a window."""
    parser = command_parser(
        "filter",
        "Measure the pass rate of the training rows of a config: the mean reward of a model's responses. Writes the"
        " rows whose pass rate is in a window, with a column pass_rate.",
    )
    parser.epilog = "example: roll-core filter Qwen/Qwen3-8B grpo.yaml -o train.filtered.jsonl"
    parser.add_argument(
        "words", metavar="MODEL | CONFIG | key=value", nargs="*",
        help="one model (as for eval), one config, and overrides of its rows and group size, or of the evaluation",
    )  # fmt: skip
    parser.add_argument("-o", "--out", metavar="FILE", type=Path, required=True, help="new file: .jsonl or .parquet")
    parser.add_argument("--low", type=float, default=0.0, help="lower bound, exclusive (default: 0)")
    parser.add_argument("--high", type=float, default=1.0, help="upper bound, exclusive (default: 1)")
    parser.add_argument("--all", action="store_true", help="write all rows, for prompt_sampler: pass_rate")
    parser.add_argument("--no-files", action="store_true", help="do not check models, rows and reward functions")
    options = parser.parse_intermixed_args(words)
    models, configs, overrides = _models_and_configs(options.words)
    if len(configs) != 1 or len(models) != 1:
        parser.error("expected one model, and one config file")
    if not options.low < options.high:
        parser.error("--low must be less than --high")
    if options.out.suffix not in (".jsonl", ".parquet") or options.out.exists():
        parser.error(f"{options.out}: expected the name of a new file that ends with .jsonl or .parquet")
    from roll_core.cli.main import stop_signals

    with stop_signals():
        from roll_core.cli.run import run_loaded
        from roll_tools.evaluation import evaluations
        from roll_tools.row_filter import write_filtered

        (loaded,) = evaluations(models, configs[0], overrides, registry, files=not options.no_files, training=True)
        (result,) = run_loaded([loaded], registry)
        if result.exit_code:
            return result.exit_code
        window = None if options.all else (options.low, options.high)
        sys.stdout.write(f"{write_filtered(loaded.config, result.run_dir, options.out, window)}\n")
    return 0


def _place(text: str) -> Path | str:
    """A path, or the URL of a checkpoint store."""
    return text if "://" in text else Path(text)


def checkpoint(words: Sequence[str], registry: Registry) -> int:
    """List or verify the checkpoints of a run, convert one to a model, or merge an adapter."""
    parser = command_parser(
        "checkpoint", "List or verify the checkpoints of a run, convert one to a model, or merge an adapter."
    )
    actions = parser.add_subparsers(dest="action", metavar="list | verify | convert | merge", required=True)
    listing = actions.add_parser("list", help="list the checkpoints of a run or an experiment", allow_abbrev=False)
    listing.add_argument("place", metavar="RUN_OR_DIR", type=_place, help="directory of a run or an experiment, or URL")
    listing.add_argument("--verify", action="store_true", help="compare digests too, not only file sizes")
    verifying = actions.add_parser("verify", help="compare all files with the recorded digests", allow_abbrev=False)
    verifying.add_argument(
        "places", metavar="RUN_OR_CHECKPOINT", type=_place, nargs="+", help="checkpoint or run directories, or URLs"
    )
    for subcommand in (listing, verifying):
        subcommand.add_argument("--json", action="store_true", help="print JSON")
        subcommand.add_argument(
            "--storage-option",
            metavar="KEY=VALUE",
            action="append",
            default=[],
            help="a key of checkpoint_store.storage_options, for URLs; the value is YAML; may be repeated",
        )
    converting = actions.add_parser(
        "convert",
        help="write a role's model as a directory for transformers",
        description="Write a role's model as a directory that transformers loads. Does not need the run's hardware. If"
        " the checkpoint is not portable, this process builds the role's strategy with one rank.",
        allow_abbrev=False,
    )
    merging = actions.add_parser(
        "merge",
        help="write a model with its adapter merged, as a directory for transformers",
        description="Write a model with its LoRA adapter merged, as a directory that transformers loads: of a"
        " checkpoint, or of an adapter that a run exported or peft saved.",
        allow_abbrev=False,
    )
    merging.add_argument(
        "place", metavar="RUN_OR_CHECKPOINT_OR_ADAPTER", type=Path, help="checkpoint, run, or adapter directory"
    )
    converting.add_argument(
        "place", metavar="RUN_OR_CHECKPOINT", type=Path, help="checkpoint, or run directory: its newest one"
    )
    for subcommand in (converting, merging):
        subcommand.add_argument("out", metavar="OUT", type=Path, help="directory to create")
        subcommand.add_argument("--role", help="trained role; required if there are several")
        subcommand.add_argument("--base-model", metavar="DIR", help="new path of the model that the run started from")
        subcommand.add_argument("--platform", help="platform of the strategy (default: detected)")
        subcommand.add_argument("--trust-remote-code", action="store_true", help="execute code of the base model")
        subcommand.add_argument(
            "--set",
            metavar="KEY=VALUE",
            action="append",
            default=[],
            help="change a key of strategy_config, such as tensor_model_parallel_size=1; may be repeated",
        )
    options = _parse_action(parser, actions, words)
    if options.action in ("convert", "merge"):
        from roll_tools.convert import convert_checkpoint

        return convert_checkpoint(
            options.place,
            options.out,
            registry,
            role=options.role,
            base_model=options.base_model,
            platform=options.platform,
            trust_remote_code=options.trust_remote_code,
            settings=options.set,
            merged=options.action == "merge",
        )
    from roll_tools.checkpoint_listing import list_checkpoints, verify_checkpoints
    from roll_tools.settings import parse_settings

    store = parse_settings(options.storage_option)
    if options.action == "list":
        return list_checkpoints(options.place, as_json=options.json, digests=options.verify, store=store)
    return verify_checkpoints(options.places, as_json=options.json, store=store)


def _parse_action(
    parser: argparse.ArgumentParser, actions: argparse._SubParsersAction[argparse.ArgumentParser], words: Sequence[str]
) -> argparse.Namespace:
    """Parse the words of a command with actions. Those of an action may be in any order, which argparse does not do."""
    if not words or words[0] not in actions.choices:
        return parser.parse_args(words)
    options = actions.choices[words[0]].parse_intermixed_args(words[1:])
    options.action = words[0]
    return options


def envs(words: Sequence[str], registry: Registry) -> int:
    """List the environments of installed packages, play an episode of one, or test one."""
    parser = command_parser("envs", "List the environments of installed packages, play an episode of one, or test one.")
    actions = parser.add_subparsers(dest="action", metavar="list | play | test", required=True)
    actions.add_parser("list", help="list environments with the keys of env_config", allow_abbrev=False)
    playing = actions.add_parser(
        "play", help="play an episode; each line is a reply, or a model replies", allow_abbrev=False
    )
    testing = actions.add_parser(
        "test", help="try to get rewards without solving a task, and run the conformance tests", allow_abbrev=False
    )
    for action in (playing, testing):
        action.add_argument("name", metavar="NAME", help="environment, or your own class as module:Class")
        action.add_argument("settings", metavar="KEY=VALUE", nargs="*", help="keys of env_config")
        action.add_argument(
            "--task", metavar="JSON", type=_columns, default={}, help='columns of a row of data: {"question": "…"}'
        )
    testing.add_argument("-k", metavar="EXPRESSION", default="", help="select tests, as pytest does: -k trick")
    playing.add_argument("--seed", type=int, default=0, help="seed of the episode (default: 0)")
    playing.add_argument(
        "--engine",
        metavar="URL",
        type=_url,
        help="a model replies: base URL of an OpenAI-compatible API, such as http://localhost:8000/v1; its key is the"
        " environment variable OPENAI_API_KEY",
    )
    playing.add_argument("--model", default="", help="name of the model (default: the first that the API lists)")
    playing.add_argument(
        "--max-turns", metavar="N", type=_count, help="end the episode after N turns (default with --engine: 32)"
    )
    options = _parse_action(parser, actions, words)
    from roll_tools.environments import list_environments, play_environment, test_environment

    if options.action == "list":
        return list_environments(registry)
    if options.action == "test":
        from roll_core.cli.plugins import from_roll_testing

        return test_environment(
            options.name,
            options.settings,
            registry,
            task=options.task,
            expression=options.k,
            run=from_roll_testing("roll_testing.integrity:test_environment"),
        )
    if options.model and not options.engine:
        playing.error("--model has no effect without --engine")
    engine, max_turns = None, options.max_turns
    if options.engine:
        from roll_tools.engine_player import EnginePlayer

        engine, max_turns = EnginePlayer(options.engine, options.model), max_turns or 32
    return play_environment(
        options.name,
        options.settings,
        registry,
        task=options.task,
        seed=options.seed,
        engine=engine,
        max_turns=max_turns,
    )


def runs(words: Sequence[str], registry: Registry) -> int:
    """List the runs of an output directory, an experiment or a single run directory."""
    parser = command_parser("runs", "List the runs of an output directory, an experiment or a single run directory.")
    parser.add_argument("dir", metavar="DIR", type=Path, nargs="?", default=Path("output"), help="default: output")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(words)
    from roll_tools.runs import list_runs

    return list_runs(options.dir, as_json=options.json)


def watch(words: Sequence[str], registry: Registry) -> int:
    """Follow a run until it ends."""
    parser = command_parser(
        "watch",
        "Follow a run until it ends. Ctrl-C ends only this command. The exit code is 1 if the run did not finish.",
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="run directory, or that of an experiment: its newest run")
    options = parser.parse_args(words)
    from roll_tools.runs import watch as follow

    return follow(options.run)


def push(words: Sequence[str], registry: Registry) -> int:
    """Upload the model of a run to the Hugging Face Hub, with a model card."""
    parser = command_parser(
        "push",
        "Upload the exported model of a run to the Hugging Face Hub. Writes a model card beside the model, unless there"
        " is one: edit it after --dry-run.",
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="run directory, or that of an experiment: its newest run")
    parser.add_argument("repo", metavar="OWNER/NAME", help="repository; created if there is none")
    parser.add_argument("--model", metavar="DIR", type=Path, help="model to upload (default: the run's export)")
    parser.add_argument("--private", action="store_true", help="create the repository as private")
    parser.add_argument("--dry-run", action="store_true", help="write the card and list the files; send nothing")
    options = parser.parse_args(words)
    from roll_tools.hub import push_model

    return push_model(options.run, options.repo, model=options.model, private=options.private, dry_run=options.dry_run)


def report(words: Sequence[str], registry: Registry) -> int:
    """Write the report of a run again, or a page that compares several runs."""
    parser = command_parser(
        "report",
        "Write report.html of a run directory again, also of a run that is in progress. With several runs, write one"
        " page that compares them.",
    )
    parser.add_argument(
        "runs", metavar="RUN", type=Path, nargs="+", help="run directory, or that of an experiment: its newest run"
    )
    parser.add_argument(
        "-o", "--out", metavar="FILE", type=Path, help="page that compares several runs (default: comparison.html)"
    )
    options = parser.parse_intermixed_args(words)
    if options.out and len(options.runs) == 1:
        parser.error("-o only with several runs: the report of one run is in its directory")
    from roll_tools.comparison import write_comparison
    from roll_tools.open_run import open_run
    from roll_tools.page import write_report

    runs = [open_run(run) for run in options.runs]
    if len(runs) == 1:
        written = write_report(runs[0].path)
    else:
        written = write_comparison(runs, options.out or Path("comparison.html"))
    sys.stdout.write(f"{written}\n")
    return 0


def _columns(text: str) -> dict[str, Any]:
    """Type of an argument: a JSON object."""
    try:
        columns = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected JSON: {error}") from None
    if not isinstance(columns, dict):
        raise argparse.ArgumentTypeError(f"found {text!r}, expected an object")
    return columns


def _count(text: str) -> int:
    """Type of an argument: a whole number > 0."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"found {text}, expected a whole number > 0")
    return int(text)


def _url(text: str) -> str:
    """Type of an argument: the address of an HTTP server."""
    if not re.fullmatch(r"https?://[^/\s]\S*", text):
        raise argparse.ArgumentTypeError(f"found {text}, expected http://HOST or https://HOST")
    return text


def _amount(text: str) -> float:
    """Type of an argument: a finite number ≥ 0."""
    try:
        amount = float(text)
    except ValueError:
        amount = math.nan
    if not 0 <= amount < math.inf:
        raise argparse.ArgumentTypeError(f"found {text}, expected a number ≥ 0")
    return amount
