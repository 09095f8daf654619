"""`roll-core push`: uploads the model of a run to the Hugging Face Hub, with a model card.

run.json  metrics.jsonl  config.yaml  ─►  export/README.md
export/*                              ─►  the files of the repository
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from roll_core.config.secrets import Redactor
from roll_core.errors import ModelError, RunDirectoryError
from roll_core.runtime.records.run_files import writing
from roll_core.runtime.records.tracking import read_metrics
from roll_tools.open_run import open_run
from roll_tools.rendering import template
from roll_tools.saved_record import read_state

if TYPE_CHECKING:
    from roll_core.runtime.records.run_dir import RunDir

CARD = "README.md"
_LIBRARIES = (
    ("adapter_config.json", "peft"),
    ("model_index.json", "diffusers"),
    ("config.json", "transformers"),
)
"""File of a model's directory, and the library that loads it."""
_SHOWN = ("val/", "score/", "reward/", "train/loss", "train/token_accuracy")
"""Beginnings of the metrics in the card."""
_VERSIONS = ("roll-core", "torch", "transformers")


def push_model(place: Path, repo: str, *, model: Path | None, private: bool, dry_run: bool) -> int:
    """Write the model card, unless the directory has one, and upload the directory. Returns the exit code 0.

    `dry_run` writes the card and prints the files without any network access. Raises `RunDirectoryError` if there is
    no model, and `ModelError` if the upload fails.
    """
    run = open_run(place)
    folder = Path(os.path.expanduser(model or run.export)).absolute()
    library = next((name for file, name in _LIBRARIES if (folder / file).is_file()), None)
    if library is None:
        raise RunDirectoryError(
            f"{folder} has no model: expected {', '.join(file for file, _ in _LIBRARIES[:-1])} or config.json. An"
            " unfinished run has no export: write a checkpoint with `roll-core checkpoint convert` and give --model"
        )
    card = folder / CARD
    if not card.is_file():
        with writing(card):
            card.write_text(model_card(run, repo, library), encoding="utf-8")
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in files:
        sys.stdout.write(f"{path.relative_to(folder)}  {path.stat().st_size:,} bytes\n")
    if dry_run:
        sys.stdout.write(f"dry run: nothing was sent to {repo}; the card is {card}\n")
        return 0
    sys.stdout.write(f"{_upload(folder, repo, run.name, private=private)}\n")
    return 0


def model_card(run: RunDir, repo: str, library: str) -> str:
    """Text of the model card: metadata, use, results of the run, its settings without secrets and local paths."""
    record, outcome = read_state(run)
    try:
        config = yaml.safe_load(run.config.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        config = {}
    config = config if isinstance(config, dict) else {}
    base = config.get("pretrain")
    base = base if isinstance(base, str) and _is_hub_id(base) else None
    last: dict[str, float] = {}
    for row in read_metrics(run.metrics):
        last |= {name: value for name, value in row.items() if name.startswith(_SHOWN)}
    algorithms = [str(config[key]) for key in ("adv_estimator", "pg_variant") if config.get(key)]
    metadata: dict[str, Any] = {"library_name": library, "tags": ["roll", record.pipeline or "rlvr", *algorithms]}
    if library == "transformers":
        metadata["pipeline_tag"] = "text-generation"
    if base is not None:
        metadata["base_model"] = base
    settings = {
        key: value
        for key, value in config.items()
        if isinstance(value, int | float | str) and not (isinstance(value, str) and _is_path(value))
    }
    text = template("model_card.md.j2").render(
        metadata=yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True),
        name=repo.rpartition("/")[2],
        repo=repo,
        library=library,
        base=base,
        record=record,
        outcome=outcome,
        metrics=sorted(last.items()),
        settings=yaml.safe_dump(settings, sort_keys=True, allow_unicode=True),
        versions={name: record.versions[name] for name in _VERSIONS if name in record.versions},
    )
    return Redactor().text(text)


def _is_path(value: str) -> bool:
    return value.startswith(("/", "~", ".")) or "\\" in value


def _is_hub_id(value: str) -> bool:
    """True for `owner/name` that is no directory here."""
    return value.count("/") == 1 and not _is_path(value) and not Path(value).exists()


def _upload(folder: Path, repo: str, run: str, *, private: bool) -> str:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    api = HfApi()
    try:
        api.create_repo(repo, private=private, exist_ok=True)
        commit = api.upload_folder(folder_path=str(folder), repo_id=repo, commit_message=f"Model of the run {run}")
    except (HfHubHTTPError, HFValidationError, OfflineModeIsEnabled, OSError) as error:
        raise ModelError(
            f"{folder} was not uploaded to {repo}: {Redactor().text(str(error))}; check the name, `hf auth login` or"
            " HF_TOKEN, and the connection"
        ) from error
    return str(commit)
