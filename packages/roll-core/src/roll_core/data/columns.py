"""Columns that Jinja expressions compute from the columns of a row: `data_args.columns`."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

from roll_core.errors import DataError, closest, install_command
from roll_core.spec.config import COLUMN_FILTERS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from jinja2.sandbox import SandboxedEnvironment


class ColumnExpressions:
    """Computes the columns of rows.

    An expression alone, `{{ tests }}`, keeps the type of its value. Any other template is text. Both see the columns of
    the row by name, all of them as `row`, and the name of the file as `file_name`. Besides Jinja's filters there are
    `from_json` and `shuffled(seed)`.
    """

    def __init__(self, columns: Mapping[str, str], file_name: str) -> None:
        """`columns` are templates by the name of the column that they compute. Raises `DataError`."""
        try:
            from jinja2 import StrictUndefined
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError as error:
            raise DataError(f"data_args.columns needs {install_command('jinja2')}") from error
        environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, finalize=_finalized)
        environment.filters |= dict(zip(COLUMN_FILTERS, (json.loads, _shuffled), strict=True))
        self._file_name = file_name
        self._columns = {name: _compiled(environment, text) for name, text in columns.items()}

    def __call__(self, values: Mapping[str, Any], number: int) -> dict[str, Any]:
        """The columns of row `number`, and the computed ones. Raises `DataError`, naming row and column."""
        from jinja2 import StrictUndefined, UndefinedError

        seen = {"file_name": self._file_name, "row": values, **values}
        computed: dict[str, Any] = {}
        for name, compute in self._columns.items():
            where = f"{self._file_name} row {number}: data_args.columns.{name}"
            try:
                value = compute(seen)
                if isinstance(value, StrictUndefined):
                    str(value)  # raises UndefinedError
            except UndefinedError as error:
                close = next((close for word in str(error).split("'")[1::2] if (close := closest(word, values))), "")
                hint = f"did you mean {close!r}?" if close else f"the row has {', '.join(map(repr, values))}"
                raise DataError(f"{where}: {error}; {hint}") from error
            except Exception as error:  # of any function in the template
                raise DataError(f"{where}: {type(error).__name__}: {error}") from error
            computed[name] = value
        return {**values, **computed}


def _shuffled(values: Iterable[Any], seed: object) -> list[Any]:
    """The values in a random order that depends only on the text of `seed`, on every machine."""
    items = list(values)
    return random.Random(str(seed)).sample(items, len(items))


def _finalized(value: Any) -> Any:
    """A value that becomes text. Raises `ValueError` for a missing one, which Jinja would write as None."""
    if value is None:
        raise ValueError("an expression has no value (null); write {{ column or '' }} for columns that may lack one")
    return value


def _compiled(environment: SandboxedEnvironment, text: str) -> Callable[[Mapping[str, Any]], Any]:
    from jinja2 import nodes

    parts = [node for output in environment.parse(text).body for node in getattr(output, "nodes", [output])]
    source = text.strip()
    is_alone = len(parts) == 1 and not isinstance(parts[0], nodes.TemplateData)
    if is_alone and source.startswith("{{") and source.endswith("}}"):
        expression = environment.compile_expression(source[2:-2].strip("-+"), undefined_to_none=False)
        return lambda seen: expression(seen)
    template = environment.from_string(text)
    return lambda seen: template.render(seen)
