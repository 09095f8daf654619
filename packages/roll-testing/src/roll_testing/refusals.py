"""Configs that `roll-core check` must refuse before a strategy starts, for every kind of strategy."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import pytest

from roll_core.config.loading import load
from roll_core.errors import ConfigError
from roll_testing.part import Part, registry

if TYPE_CHECKING:
    from pathlib import Path

DTYPES = ("fp32", "bf16", "fp16")


class RefusalTests(Part):
    """Tests that need only the record."""

    _run: ClassVar[str]
    """Config template with the fields `platform`, `dtype` and `name`."""

    def test_an_undeclared_dtype_is_refused(self, tmp_path: Path) -> None:
        """`roll-core check` must refuse a dtype that the record does not declare, and name the declared ones."""
        declared = self.provider.capabilities.dtypes
        undeclared = [each for each in DTYPES if each not in declared]
        if not undeclared:
            pytest.skip(f"{self.name} declares every dtype")
        platform = next(iter(self.provider.platforms), "cpu")
        self._refused(tmp_path, undeclared[0], platform, *declared)

    def test_an_undeclared_platform_is_refused(self, tmp_path: Path) -> None:
        """`roll-core check` must refuse a platform that the record does not declare, and name the declared ones."""
        if not self.provider.platforms:
            pytest.skip(f"{self.name} declares every platform")
        self._refused(tmp_path, self.provider.capabilities.dtypes[0], "no_such_platform", *self.provider.platforms)

    def _refused(self, folder: Path, dtype: str, platform: str, *named: str) -> None:
        file = folder / "run.yaml"
        file.write_text(self._run.format(name=self.name, dtype=dtype, platform=platform), encoding="utf-8")
        with pytest.raises(ConfigError) as caught:
            load(file, [], registry())
        said = str(caught.value)
        if self.provider.name not in said or any(name not in said for name in named):
            raise AssertionError(
                f"{self.name} with dtype {dtype} on platform {platform}: the error names no way out:\n{said}"
            )
