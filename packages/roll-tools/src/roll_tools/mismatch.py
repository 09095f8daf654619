"""`roll-core doctor mismatch`: names the causes why engine and trainer give the same tokens different logprobs."""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from roll_core.config import load
from roll_core.data.modelscope import with_local_models
from roll_core.errors import MissingRequirementError, UnsupportedError, install_command
from roll_core.runtime.records.mismatch import read_logprobs
from roll_core.spec.providers import InferProvider, TrainProvider
from roll_tools.open_run import open_run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedTokenizerBase

    from roll_core.plugins.registry import Registry
    from roll_core.runtime.records.mismatch import Diagnosis
    from roll_core.runtime.run.active_run import DatasetCache
    from roll_core.spec.config import RunConfig
    from roll_core.types import Media, TokenIds
    from roll_tools.mismatch_experiments import Pair

ENGINE = "actor_infer"
NUM_PROMPTS = 6
MAX_NEW_TOKENS = 32


def show_mismatch(
    source: Path,
    overrides: Sequence[str],
    registry: Registry,
    *,
    step: int | None,
    engine: str | None,
    threshold: float | None,
    as_json: bool,
) -> int:
    """Print the causes of the gap of a run's recorded tokens, or of the trainer and engine of a config.

    `engine` replaces the config's engine. Returns the exit code: 1 if the gap exceeds `threshold`, by default the
    noise, otherwise 0. Raises `RunDirectoryError` or `RecordingError` for a run without logprobs, and
    `UnsupportedError` for a config without trainer and engine.
    """
    if source.is_dir():
        diagnosis = read_logprobs(open_run(source).path, step).diagnose()
    else:
        chosen = [f"{ENGINE}.strategy_args={{strategy_name: {engine}}}"] if engine else []
        config = with_local_models(load(source, [*overrides, *chosen], registry).config)
        with tempfile.TemporaryDirectory() as folder:
            diagnosis = pair_of(config, registry, Path(folder)).diagnose()
    bound = diagnosis.noise if threshold is None else threshold
    exceeds = not diagnosis.gap <= bound
    if as_json:
        sys.stdout.write(json.dumps({**diagnosis.as_json(), "threshold": bound, "ok": not exceeds}, indent=2) + "\n")
    else:
        _show(diagnosis)
    return 1 if exceeds else 0


def pair_of(config: RunConfig, registry: Registry, folder: Path) -> Pair:
    """Trainer and engine of a config, with its first prompts. `folder` is for its tokenizer.

    Raises `UnsupportedError` if the config has no trained policy or no engine.
    """
    from roll_core.runtime.cluster.platform import select_platform
    from roll_core.runtime.run.active_run import DatasetCache
    from roll_core.runtime.run.tokenizer import prepare_tokenizer
    from roll_core.runtime.workers.build import model_spec, provider_of, served_adapters
    from roll_core.spec.pipeline import RoleSpec

    try:
        from roll_tools.mismatch_experiments import Pair
        from roll_tools.mismatch_sides import Part
    except ModuleNotFoundError as error:
        raise MissingRequirementError(
            f"roll-core doctor mismatch: {error.name} is not installed. Run: {install_command('roll-modeling')}"
        ) from error
    if not config.policy_role or ENGINE not in config.roles():
        raise UnsupportedError(f"pipeline {config.pipeline} has no trainer and engine of one policy to compare")
    data = DatasetCache()
    tokenizer = prepare_tokenizer(config, data, folder)
    roles = (
        RoleSpec(name=config.policy_role, kind="train"),
        RoleSpec(name=ENGINE, kind="generate", model_from=config.policy_role),
    )
    parts = []
    for role, kind in zip(roles, (TrainProvider, InferProvider), strict=True):
        provider, worker = provider_of(role.name, config, registry), config.roles()[role.name]
        if not isinstance(provider, kind) or worker.strategy_args is None:
            raise UnsupportedError(f"{role.name} is no role that can be compared")
        model = model_spec(role, config, Path(str(tokenizer.name_or_path)))
        if role.kind == "generate" and (served := served_adapters(role, config, registry)) is not None:
            model = replace(model, lora=served)
        options = worker.strategy_args.strategy_config
        parts.append(Part(provider=provider, config=options, model=model, key=role.name))
    length = min(config.response_length, MAX_NEW_TOKENS)
    params = config.roles()[ENGINE].generating_args.sampling_params(default_max_new_tokens=length)
    return Pair(
        trainer=parts[0],
        engine=parts[1],
        params=replace(params, max_new_tokens=length, min_new_tokens=0, stop=(), seed=None, ignore_eos=True),
        **_prompts(config, data, tokenizer),
        device=select_platform(registry, config.platform).device(0),
    )


def _prompts(config: RunConfig, data: DatasetCache, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """The first prompts of the config's data with their images, and the longest one with another last token: a common
    prefix."""
    from roll_core.data.encode import encode_prompts
    from roll_tools.data_audit import sources

    prompts: list[tuple[TokenIds, tuple[Media, ...]]] = []
    for source in list(dict(sources(config)).values())[:1]:
        encoded, _ = encode_prompts(data.rows(source), source, tokenizer, prompt_length=config.prompt_length)
        prompts = [(prompt.tokens, prompt.media) for prompt in encoded[:NUM_PROMPTS]]
    if not prompts:
        rng = np.random.default_rng(0)
        lengths = (min(8 * size, config.prompt_length) for size in range(1, 5))
        prompts = [(rng.integers(0, len(tokenizer), size=length), ()) for length in lengths]
    if plain := [tokens for tokens, media in prompts if not media]:
        longest = max(plain, key=len)
        prompts.append((np.append(longest[:-1], (longest[-1] + 1) % len(tokenizer)), ()))
    return {"prompts": [tokens for tokens, _ in prompts], "media": [media for _, media in prompts]}


def _show(diagnosis: Diagnosis) -> None:
    from roll_tools.output import findings_table, open_console

    console = open_console()
    console.print(
        f"gap {diagnosis.gap:.3g} nats, mean |engine's logprob - trainer's logprob| of {diagnosis.num_tokens} tokens;"
        f" noise {diagnosis.noise:.3g}"
    )
    rows = [
        (
            "error",
            f"{cause.name} {cause.share:.0%}",
            cause.evidence,
            cause.fix,
            f"{cause.before:.3g} → {cause.after:.3g}",
        )
        for cause in diagnosis.causes
    ]
    rows += [("note", *_halves(note), "", "") for note in diagnosis.notes]
    rows += [("warning", "not examined", reason, "", "") for reason in diagnosis.not_examined]
    if rows:
        console.print(findings_table(("cause", "measured", "gap"), rows))
    console.print(diagnosis.summary())


def _halves(note: str) -> tuple[str, str]:
    subject, _, told = note.partition(": ")
    return subject, told
