"""Schema of values that cross between Python environments: plain bytes, independent of library versions.

MessagePack with only these extensions. The content of each extension is MessagePack too. Text may have lone surrogates:
a response may contain JSON with an escaped half of a pair.

    TUPLE      [value, ...]                                SET        [value, ...]
    ARRAY      [numpy's dtype string, [size, ...], bytes in row-major order]; [] sizes and NUMBER for a scalar
    RECORD     ["module:Class", {field: value}]            of a dataclass, which is rebuilt by its constructor
    ERROR      ["module:Class", [argument, ...], trace, [note, ...]]      of ROLL's own errors and Python's
    NAME       "module:name" of a function or class        PATH       text        ENUM       ["module:Class", value]
    DATETIME, DATE, TIME, DECIMAL       text; of a time zone, the offset        DURATION   [days, seconds, microseconds]
    MEDIA      digest of an image or video whose record came earlier in the message

A pickle would name internal classes of the library that created a value, in a version that the receiver may not have.
It could also run code. Tensors are not supported: weights travel through `roll_core.runtime.weights`.
"""

from __future__ import annotations

import builtins
import dataclasses
import datetime
import enum
import importlib
import types
from collections.abc import Callable, Mapping
from decimal import Decimal
from functools import partial
from pathlib import Path, PurePath
from typing import Any

import msgpack
import numpy as np

from roll_core.errors import RollError, UnsupportedError
from roll_core.types import Media

TUPLE, SET, ARRAY, NUMBER, RECORD, ERROR, NAME, PATH, ENUM, DATETIME, DATE, TIME, DURATION, DECIMAL = range(1, 15)
MEDIA = 15
_TEXT = "surrogatepass"
_LARGEST = 2**32 - 1
"""Maximum size of one value in bytes: MessagePack's own limit."""


def dumps(value: Any) -> bytes:
    """Serialize a value. Raises `UnsupportedError` with the type of a value that the schema does not support."""
    return _packed(value, set())


def _packed(value: Any, sent: set[str]) -> bytes:
    """`sent` are digests of the images and videos that the message has so far."""
    encode = partial(_extension, sent=sent)
    try:
        packed: bytes = msgpack.packb(value, default=encode, strict_types=True, unicode_errors=_TEXT)
    except (TypeError, ValueError, OverflowError) as error:
        if isinstance(error, UnsupportedError):
            raise
        raise UnsupportedError(f"a value cannot be sent to another Python environment: {error}") from error
    return packed


def loads(data: bytes) -> Any:
    """Inverse of `dumps`.

    Arrays are writable. Raises `UnsupportedError` for a value that this environment cannot rebuild.
    """
    return _unpacked(data, {})


def _unpacked(data: bytes, received: dict[str, Media]) -> Any:
    limits = dict.fromkeys(("max_bin_len", "max_ext_len", "max_str_len", "max_array_len", "max_map_len"), _LARGEST)
    hook = partial(_value, received=received)
    return msgpack.unpackb(data, ext_hook=hook, strict_map_key=False, unicode_errors=_TEXT, **limits)


def _extension(value: Any, sent: set[str]) -> Any:
    """Encode a value that MessagePack itself does not support."""
    kind = type(value)
    content: Any
    match value:
        case tuple():
            code, content = TUPLE, list(value)
        case set() | frozenset():
            code, content = SET, list(value)
        case np.ndarray() | np.generic():
            if value.dtype.hasobject or value.dtype.names:
                raise UnsupportedError(f"an array of dtype {value.dtype} cannot be sent to another Python environment")
            code = ARRAY if isinstance(value, np.ndarray) else NUMBER
            array = np.asarray(value)  # the dtype of an empty text itself has no bytes: numpy cannot read it
            content = [array.dtype.str, list(array.shape), array.tobytes()]
        case enum.Enum():
            code, content = ENUM, [name_of(kind), value.value]
        case BaseException():
            if not isinstance(value, RollError) and kind.__module__ != builtins.__name__:
                raise UnsupportedError(f"{kind.__module__}.{kind.__qualname__} may not exist in the other environment")
            trace = value.trace if isinstance(value, RollError) else ""
            code, content = ERROR, [name_of(kind), list(value.args), trace, list(getattr(value, "__notes__", ()))]
        case PurePath():
            code, content = PATH, str(value)
        case datetime.datetime():
            code, content = DATETIME, value.isoformat()
        case datetime.date():
            code, content = DATE, value.isoformat()
        case datetime.time():
            code, content = TIME, value.isoformat()
        case datetime.timedelta():
            code, content = DURATION, [value.days, value.seconds, value.microseconds]
        case Decimal():
            code, content = DECIMAL, str(value)
        case type() | types.FunctionType() | types.BuiltinFunctionType():
            code, content = NAME, name_of(value)
        case Mapping():
            return dict(value)
        case str() | int() | float():
            for plain in (str, int, float):
                if isinstance(value, plain) and kind is not plain:
                    return plain(value)
            raise UnsupportedError(f"{value} is too large to be sent to another Python environment")
        case Media() if value.digest in sent:
            code, content = MEDIA, value.digest
        case _ if dataclasses.is_dataclass(value):
            if isinstance(value, Media):
                sent.add(value.digest)
            value = value.in_memory() if isinstance(value, Media) else value
            fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
            code, content = RECORD, [name_of(kind), fields]
        case _:
            raise UnsupportedError(f"{kind.__module__}.{kind.__qualname__} cannot be sent to another environment")
    return msgpack.ExtType(code, _packed(content, sent))


def _value(code: int, data: bytes, received: dict[str, Media]) -> Any:
    content = _unpacked(data, received)
    if code in (ARRAY, NUMBER):
        dtype, shape, raw = content
        array = np.frombuffer(raw, dtype=np.dtype(dtype)).reshape(shape)
        return array.copy() if code == ARRAY else array[()]
    if code == ENUM:
        return _found(content[0], enum.Enum)(content[1])
    if code == ERROR:
        name, args, trace, notes = content
        error: BaseException = _found(name, BaseException)(*args)
        if isinstance(error, RollError) and trace:
            error.trace = trace
        for note in notes:
            error.add_note(note)
        return error
    if code == RECORD:
        record = _found(content[0])
        if isinstance(record, type) and dataclasses.is_dataclass(record):
            value = record(**content[1])
            if isinstance(value, Media):
                received[value.digest] = value
            return value
        raise UnsupportedError(f"{content[0]} is not a dataclass in this Python environment")
    if code == DURATION:
        return datetime.timedelta(*content)
    simple: dict[int, Callable[[Any], Any]] = {
        TUPLE: tuple,
        SET: set,
        NAME: _found,
        PATH: Path,
        DATETIME: datetime.datetime.fromisoformat,
        DATE: datetime.date.fromisoformat,
        TIME: datetime.time.fromisoformat,
        DECIMAL: Decimal,
        MEDIA: received.__getitem__,
    }
    if code not in simple:
        raise UnsupportedError(f"extension {code} is unknown: the other environment has another roll-core")
    return simple[code](content)


def name_of(thing: Any) -> str:
    """Return `"module:name"` of a class or function.

    Raises `UnsupportedError` if it cannot be imported by that name.
    """
    name = f"{thing.__module__}:{thing.__qualname__}"
    if "<" in name or thing.__module__ == "__main__":
        raise UnsupportedError(f"{name} cannot be imported by its name in another Python environment")
    return name


def _found(name: str, base: type | None = None) -> Any:
    """Import what `name_of` named; with `base`, only a subclass of it."""
    module, _, path = name.partition(":")
    try:
        imported: Any = importlib.import_module(module)
        for part in path.split("."):
            imported = getattr(imported, part)
    except (ImportError, AttributeError) as error:
        raise UnsupportedError(f"{name} cannot be imported in this Python environment: {error}") from error
    if base is not None and not (isinstance(imported, type) and issubclass(imported, base)):
        raise UnsupportedError(f"{name} is not a {base.__name__} in this Python environment")
    return imported
