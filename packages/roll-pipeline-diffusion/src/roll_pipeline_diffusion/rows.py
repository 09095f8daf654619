"""Columns and files of rows: what `roll-core check` can check without a model. Light: imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll_core.data.rows import file_names, need_column, text_of
from roll_core.errors import DataError, RollError
from roll_core.spec.config import ModelArguments
from roll_pipeline_diffusion.encoders import given_conditioning
from roll_pipeline_diffusion.models.description import describe_args

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roll_core.data.rows import Row, Rows
    from roll_core.spec.config import DataArguments
    from roll_pipeline_diffusion.models.description import FlowDescription

CONDITIONING = "cond"
"""Column, or prefix of columns, with precomputed conditioning."""


def check_rows(rows: Rows, data: DataArguments, images: Sequence[str], values: Mapping[Any, Any]) -> None:
    """Check columns, types, files, and precomputed conditioning by the model's config if that is a local file.

    `values` are the config's values as written. Raises `DataError`.
    """
    columns = [column for column in rows.columns if column == CONDITIONING or column.startswith(f"{CONDITIONING}.")]
    model, guided = _model(values), _is_guided(values)
    if not columns:
        need_column(data.prompt, rows)
    for column in images:
        need_column(column, rows)
    for row in rows:
        has = [column for column in columns if row.values.get(column) is not None]
        if not has:
            text_of(row, data.prompt, rows)
            if model is not None:
                need_encoder(
                    row,
                    data,
                    model,
                    encoder=str(values.get("prompt_encoder", "pipeline")),
                    guidance=values.get("embedded_guidance"),
                )
        elif guided and not any(name.startswith(f"un{CONDITIONING}") for name, value in row.values.items() if value):
            raise DataError(
                f"{row.where}: has {has[0]!r}, but no 'un{CONDITIONING}', which guidance_scale other than 1 and"
                " conditioning_dropout need: add it, or set guidance_scale 1"
            )
        if model is not None:
            for kind in (CONDITIONING, f"un{CONDITIONING}"):
                given_conditioning(row.values, model, kind=kind, base=folder_of(row, data), where=row.where)
        for column in images:
            image_file(row, data, column)


def need_encoder(
    row: Row, data: DataArguments, model: FlowDescription, *, encoder: str, guidance: float | None
) -> None:
    """Raise `DataError` unless the prompt of a row without precomputed conditioning can be encoded."""
    if encoder == "pipeline" and not model.pipeline:
        raise DataError(
            f"{row.where}: no column {CONDITIONING!r} or '{CONDITIONING}.<name>', and the model has no text encoders"
            f" for column {data.prompt!r}: name a pipeline's directory as the model, precompute the conditioning, or"
            " set prompt_encoder to words"
        )
    if guidance is None and "guidance" in model.family.conditioning(model.config):
        raise DataError(
            f"{row.where}: {model.family.class_name} embeds a guidance scale: set embedded_guidance, such as 3.5"
        )


def _model(values: Mapping[Any, Any]) -> FlowDescription | None:
    """The trained model; None if its keys are invalid, which the schema reports, or if it is not a local directory."""
    try:
        args = ModelArguments.model_validate(values["actor_train"]["model_args"])
        return describe_args(args, values.get("pretrain"))
    except (RollError, ValueError, TypeError, KeyError):
        return None


def _is_guided(values: Mapping[Any, Any]) -> bool:
    """True if programs need conditioning without the prompt."""
    scales = [values.get("guidance_scale"), option_of(values, "guidance_scale", "validation")]
    scaled = any(isinstance(scale, int | float) and scale != 1 for scale in scales)
    return scaled or bool(option_of(values, "conditioning_dropout"))


def option_of(values: Mapping[Any, Any], name: str, key: str = "objective_options") -> Any:
    """A value below a key of a config as written; None without it."""
    options = values.get(key)
    return options.get(name) if isinstance(options, Mapping) else None


def image_file(row: Row, data: DataArguments, column: str) -> Path:
    """File that a column names, relative to the data file. Raises `DataError` if there is none."""
    value = row.values.get(column)
    if not isinstance(value, str):
        raise DataError(f"{row.where}: column {column!r} is {type(value).__name__}, expected the name of an image file")
    file = folder_of(row, data) / value
    if not file.is_file():
        raise DataError(f"{row.where}: column {column!r} names {value}, but there is no file {file}")
    return file


def folder_of(row: Row, data: DataArguments) -> Path:
    """Directory of the file that a row is from."""
    names = [Path(path) for path in file_names(data)]
    return next((path.parent for path in names if row.where.startswith(f"{path} row ")), names[0].parent)
