"""What a resumed run shares with the run that it continues: the function of each trained model, and the tokenizer.

Weights fit another function of the same shapes (`rope_theta`, an activation), and token ids fit another vocabulary of
the same size: such a run would continue and train something else. Checkpoints therefore have a `RunIdentity`. Other
changes (learning rate, seed, data) are wanted, and are logged once.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from roll_core.config.dump import flat
from roll_core.errors import CheckpointMismatchError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime
    from typing import Self

    from transformers import PreTrainedTokenizerBase

    from roll_core.runtime.records.checkpoint_directory import Checkpoint
    from roll_core.spec.model import ModelSpec

log = logging.getLogger(__name__)

WITHOUT_EFFECT = frozenset(
    {
        "_name_or_path", "architectures", "bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype",
        "transformers_version", "_diffusers_version", "use_cache", "return_dict", "output_attentions",
        "output_hidden_states", "problem_type", "num_labels", "id2label", "label2id", "attn_implementation",
        "_attn_implementation", "chunk_size_feed_forward", "initializer_range", "initializer_factor",
    }
)  # fmt: skip
"""Keys of a model's config that do not change what its weights compute."""
OF_THE_ATTEMPT = frozenset({"output_dir", "exp_name", "resume_from_checkpoint"})
"""Keys of a run's config that differ between a run and the run that continues it."""
_ID = re.compile(r"\d+-[0-9a-f]{8}")
MOST_CHANGES = 20
"""Number of changed keys that are logged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunIdentity:
    """Facts about models, tokenizer and data, as plain JSON."""

    models: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Config of each trained model, by role; empty if it cannot be read here."""
    tokenizer: Mapping[str, str] = field(default_factory=dict)
    """Digests of the vocabulary and of the other parts of the run's tokenizer; empty without one."""
    data: Mapping[str, int | str] = field(default_factory=dict)
    """Sizes of the files of rows in bytes, and commits of the data sets of the Hub."""
    id: str = ""
    """Id of the run, unique on all hosts: its number and 8 hex digits."""
    attempts: Mapping[str, int] = field(default_factory=dict)
    """Last step of each run that this one continues, by id; in a checkpoint also its own."""
    date: str = ""
    """Date and time that chat templates see, in ISO format: the start of the first run, and equal in its
    continuations."""

    @classmethod
    def of(
        cls,
        models: Mapping[str, ModelSpec],
        tokenizer: PreTrainedTokenizerBase | None,
        files: Mapping[str, str | None],
        date: datetime,
        id: str,
        attempts: Mapping[str, int],
    ) -> Self:
        """Collect the facts. `files` have the rows of the run; their values are the commits of those on the Hub."""
        return cls(
            models={role: _model_config(model) for role, model in models.items()},
            tokenizer={} if tokenizer is None else _digests(tokenizer),
            data={name: fact for name, commit in files.items() if (fact := commit or _size(Path(name))) is not None},
            date=date.isoformat(),
            id=id,
            attempts=attempts,
        )

    @property
    def commits(self) -> dict[str, str]:
        """Commits of the data sets of the Hub, by their names in `file_name`."""
        return {name: fact for name, fact in self.data.items() if isinstance(fact, str)}

    @classmethod
    def read(cls, saved: Mapping[str, Any] | None) -> Self | None:
        """The identity in a checkpoint; None if it has none, or if it cannot be read."""
        try:
            identity = cls(**(saved or {}))
        except TypeError:
            return None
        if not saved or not isinstance(identity.models, dict):
            return None
        parts = (identity.tokenizer, identity.data, identity.attempts, *identity.models.values())
        if not all(isinstance(part, dict) for part in parts):
            return None
        # Retention removes checkpoints below these ids.
        attempts = identity.attempts.items()
        return identity if all(_ID.fullmatch(id) and type(step) is int for id, step in attempts) else None

    def at_step(self, step: int) -> dict[str, Any]:
        """Plain values for `read`, in the checkpoint of `step`."""
        return asdict(self) | {"attempts": {**self.attempts, self.id: step}}


def check_identity(checkpoint: Checkpoint, saved: RunIdentity, here: RunIdentity) -> None:
    """Raise `CheckpointMismatchError` if a model computes another function, or token ids mean other tokens."""
    for role, config in here.models.items():
        if changed := _changed_config(saved.models.get(role) or {}, config):
            raise CheckpointMismatchError(
                f"{checkpoint}: its weights of {role} belong to another model: {_listed(changed)}; give {role} the"
                " model of that run, or remove resume_from_checkpoint and start from an export of that run"
            )
    before, now = saved.tokenizer.get("vocabulary"), here.tokenizer.get("vocabulary")
    if before and now and before != now:
        raise CheckpointMismatchError(
            f"{checkpoint}: its run had another tokenizer, in which token ids mean other tokens (digest of the"
            f" vocabulary {before[:8]}, now {now[:8]}); use that run's tokenizer, or remove resume_from_checkpoint"
        )


def changes(checkpoint: Checkpoint, saved: RunIdentity | None, here: RunIdentity, config: Path) -> list[str]:
    """What differs from the run that wrote `checkpoint`: keys of its config, of which this run's is `config`, parts of
    the tokenizer, and files of rows."""
    old, new = _read_config(checkpoint.run / "config.yaml"), _read_config(config)
    pairs = [(key, old.get(key), new.get(key)) for key in {**old, **new}] if old and new else []
    differences = [_change(key, *values) for key, *values in pairs if values[0] != values[1]]
    if saved is not None:
        parts = here.tokenizer.items()
        differences += [f"the tokenizer's {name}" for name, part in parts if saved.tokenizer.get(name, part) != part]
        facts = [(name, saved.data.get(name, now), now) for name, now in here.data.items()]
        differences += [f"{name} ({before} → {now})" for name, before, now in facts if before != now]
    return differences


def log_changes(differences: list[str], checkpoint: Checkpoint) -> None:
    """Log the changes in one line."""
    if differences:
        log.warning("other than the run of %s: %s", checkpoint, _listed(differences))


def _model_config(model: ModelSpec) -> dict[str, Any]:
    """Config of a model with its overrides under their own key; empty if it cannot be read on this host."""
    overrides = dict(model.config_overrides)
    described: dict[str, Any] = {}
    if model.library:
        described = dict(model.random_init or {})
        for file in sorted(Path(model.path).rglob("*config.json")) if model.path else ():
            described[file.relative_to(model.path).as_posix()] = _read_json(file)
    else:
        from transformers import AutoConfig

        try:
            if model.random_init is not None:
                keys = dict(model.random_init)
                config = AutoConfig.for_model(keys.pop("model_type", ""), **keys)
            else:
                config = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
            described = json.loads(config.to_json_string(use_diff=False))
        except Exception as error:  # of transformers, or of a model's own code; reported when the model is built
            log.debug("the config of %s cannot be compared: %s", model.path or "random_init", error)
            return {}
    return {**described, "model_config_kwargs": overrides}


def _changed_config(saved: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Keys that change the function of a model.

    Keys that only one of two versions of transformers writes are no change: a new version adds keys with defaults.
    """
    if not saved or not here:
        return []
    same_version = saved.get("transformers_version") == here.get("transformers_version")
    old, new = (
        {key: value for key, value in flat(dict(config)).items() if not WITHOUT_EFFECT & set(key.split("."))}
        for config in (saved, here)
    )
    both = old.keys() & new.keys()
    return [
        _change(key, old.get(key), new.get(key))
        for key in {**old, **new}
        if old.get(key) != new.get(key) and (same_version or key in both or key.startswith("model_config_kwargs"))
    ]


def _digests(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Digest of each part of a tokenizer."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    encoding = json.loads(backend.to_str()) if backend is not None else {"class": type(tokenizer).__name__}
    parts = {
        "vocabulary": sorted(tokenizer.get_vocab().items()),
        "special tokens": sorted((name, str(token)) for name, token in tokenizer.special_tokens_map.items()),
        "chat template": tokenizer.chat_template,
        "encoding": {key: encoding.get(key) for key in ("normalizer", "pre_tokenizer", "model", "class")},
    }
    return {name: hashlib.sha256(json.dumps(part).encode()).hexdigest() for name, part in parts.items()}


def _size(path: Path) -> int | None:
    """Bytes of a file or of the files in a directory; None if it cannot be read."""
    try:
        if path.is_dir():
            return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        return path.stat().st_size
    except OSError:
        return None


def _read_config(path: Path) -> dict[str, Any]:
    """Dotted keys of a run's `config.yaml` that belong to no single attempt; empty if it cannot be read."""
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}
    return {} if not isinstance(config, dict) else flat({k: v for k, v in config.items() if k not in OF_THE_ATTEMPT})


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def _change(key: str, old: Any, new: Any) -> str:
    return f"{key} {_short(old)} → {_short(new)}"


def _short(value: Any) -> str:
    if isinstance(value, str):  # the end of a path tells more
        return value if len(value) <= 60 else f"…{value[-60:]}"
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:60]}…"


def _listed(differences: list[str]) -> str:
    more = len(differences) - MOST_CHANGES
    return ", ".join(differences[:MOST_CHANGES]) + (f", and {more} more" if more > 0 else "")
