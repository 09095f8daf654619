"""Reads data sets of the Hugging Face Hub and of ModelScope through `datasets`, which keeps them in its cache.

`hf://openai/gsm8k/main?split=test&revision=e53f048` has the arguments of `datasets.load_dataset`. Rows are read from
the Arrow files of the cache, and images are not decoded. `modelscope://` is the same for a repository of ModelScope,
whose files are downloaded first.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from roll_core.data.modelscope import MODELSCOPE, cached_copy, digest_of, lacks_modelscope, snapshot_of
from roll_core.errors import DataError, closest, install_command

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Self

_PARAMETERS = ("split", "revision")
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True, kw_only=True)
class HubName:
    """Parts of a name `hf://OWNER/NAME[/SUBSET][?split=SPLIT&revision=REVISION]`, or of one of `modelscope://`."""

    scheme: str = "hf://"
    repo: str
    subset: str | None = None
    split: str = "train"
    """A split, or a part or sum of splits in the notation of `datasets`: `train[:1000]`, `train+test`."""
    revision: str | None = None
    """Branch, tag or commit; None for the default branch."""

    @classmethod
    def parse(cls, name: str) -> Self:
        """Parse a name for which `rows.is_hub_name` is true. Raises `DataError`."""
        scheme, separator, rest = name.partition("://")
        scheme += separator
        path, _, query = rest.partition("?")
        parts = path.strip("/").split("/")
        if parts[0] == "datasets" or len(parts) not in (2, 3) or not all(parts):
            example = "/".join(parts[1:4]) if parts[0] == "datasets" and len(parts) > 2 else "openai/gsm8k"
            expected = f"{scheme}OWNER/NAME or {scheme}OWNER/NAME/SUBSET"
            raise DataError(f"{name}: expected {expected}, for example {scheme}{example}")
        values = {}
        for parameter in filter(None, query.split("&")):
            key, _, value = parameter.partition("=")
            if key not in _PARAMETERS or not value:
                close = closest(key, _PARAMETERS)
                hint = f"did you mean {close}=…?" if close else "expected split=… and revision=…"
                raise DataError(f"{name}: {parameter!r} is no parameter of a data set; {hint}")
            values[key] = unquote(value)
        return cls(scheme=scheme, repo="/".join(parts[:2]), subset=parts[2] if len(parts) == 3 else None, **values)


class HubRows:
    """Rows of a data set at one commit."""

    def __init__(self, name: str, revision: str | None = None) -> None:
        """Find the data set `name`, at the commit `revision` if it is given.

        If the Hub cannot be reached, the data set must be in the cache. Raises `DataError`.
        """
        self._name, self._source = name, HubName.parse(name)
        try:
            import datasets
        except ImportError as error:
            extra = "modelscope" if self._is_modelscope else "hub"
            raise DataError(f"{name}: data sets of the Hub need {install_command(f'roll-core[{extra}]')}") from error
        self._builder: Any
        if self._is_modelscope:
            folder = snapshot_of("dataset", self._source.repo, self._source.revision)
            self.revision = digest_of(folder)
            """Commit of the rows, or the digest of the files of ModelScope."""
            # The library may take changed files of a directory for those in its cache.
            cache = Path(datasets.config.HF_DATASETS_CACHE, "modelscope", self.revision)
            try:
                self._builder = datasets.load_dataset_builder(str(folder), self._source.subset, cache_dir=str(cache))
            except Exception as error:  # of the library, or a file of the data set
                raise self._failed(error) from error
            if revision not in (None, self.revision):
                raise DataError(
                    f"{name}: it has changed since the run that this one continues, whose files had the digest"
                    f" {revision}, now {self.revision}: name a tag or commit (?revision=…)"
                )
            return
        revision = revision or self._source.revision
        try:
            self._builder = datasets.load_dataset_builder(self._source.repo, self._source.subset, revision=revision)
        except Exception as error:  # of the library, the network, or a file of the data set
            raise self._failed(error) from error
        self.revision = str(self._builder.hash)
        if not _COMMIT.fullmatch(self.revision):
            raise DataError(f"{name}: the directory {self._source.repo} hides the data set of this name: rename it")
        # Without the Hub, the library reads the latest commit in its cache, whichever was requested.
        is_cached = type(self._builder).__module__.startswith("datasets.packaged_modules.cache")
        if is_cached and revision is not None and revision != self.revision:
            raise DataError(
                f"{name}: the Hub cannot be reached, and the latest commit in the cache is {self.revision}, not"
                f" {revision}"
            )

    @property
    def _is_modelscope(self) -> bool:
        return self._source.scheme == MODELSCOPE

    def all(self) -> Iterator[Mapping[str, Any]]:
        """Read the rows of `dataset`. Raises `DataError`."""
        dataset = self.dataset()
        try:
            yield from _values(dataset)
        except Exception as error:  # as above
            raise self._failed(error) from error

    def dataset(self) -> Any:
        """Download the data set, unless the cache has it. Returns it, memory-mapped. Raises `DataError`."""
        try:
            self._builder.download_and_prepare()
            return self._builder.as_dataset(split=self._source.split)
        except Exception as error:  # as above
            raise self._failed(error) from error

    def first(self) -> Iterator[Mapping[str, Any]]:
        """Read the rows of the split in order without downloading whole files. A part of a split is read from the
        beginning of the split. Raises `DataError`."""
        import datasets

        split = re.split(r"[\[+]", self._source.split)[0]
        has_torch = datasets.config.TORCH_AVAILABLE
        try:
            datasets.config.TORCH_AVAILABLE = False  # torch would be imported for `torch.utils.data.IterableDataset`
            yield from _values(self._builder.as_streaming_dataset(split=split))
        except Exception as error:  # as above
            raise self._failed(error) from error
        finally:
            datasets.config.TORCH_AVAILABLE = has_torch

    def _failed(self, error: Exception) -> DataError:
        lines = [line for line in str(error).splitlines() if line and not line.startswith(("Example", "\t"))]
        text = " ".join(lines) or type(error).__name__
        hint = ""
        if isinstance(error, ConnectionError):
            hint = (
                "; roll-core audit reads it into the cache where the Hub can be reached (HF_ENDPOINT, HF_HUB_OFFLINE)"
            )
        elif isinstance(error, ValueError):
            hint = f"; expected {self._source.scheme}{self._source.repo}/SUBSET?split=SPLIT"
        return DataError(f"{self._name}: {text}{hint}")


def first_hub_rows(name: str) -> Iterator[Mapping[str, Any]] | None:
    """The rows of a data set in order, without downloading whole files. Raises `DataError`.

    None for a data set of ModelScope that is not in the cache: only whole repositories are downloaded.
    """
    source = HubName.parse(name)
    if source.scheme == MODELSCOPE:
        if why := lacks_modelscope():
            raise DataError(f"{name}: {why}")
        if cached_copy("dataset", source.repo, source.revision) is None:
            return None
    return HubRows(name).first()


def _values(dataset: Any) -> Iterator[Mapping[str, Any]]:
    for table in dataset.with_format("arrow").iter(batch_size=1024):
        yield from table.to_pylist()
