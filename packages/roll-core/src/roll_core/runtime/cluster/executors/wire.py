"""Schema of values that cross between Python environments: plain bytes, independent of library versions.

MessagePack with only these extensions. The content of each extension is MessagePack too:

    TUPLE      [value, ...]                                SET        [value, ...]
    ARRAY      [numpy's dtype string, [size, ...], bytes in row-major order]; [] sizes and NUMBER for a scalar
    RECORD     ["module:Class", {field: value}]            of a dataclass, which is rebuilt by its constructor
    ERROR      ["module:Class", [argument, ...], trace, [note, ...]]      of ROLL's own errors and Python's
    NAME       "module:name" of a function or class        PATH       text        ENUM       ["module:Class", value]

A pickle would name internal classes of the library that created a value, in a version that the receiver may not have.
It could also run code. Tensors are not supported: weights travel through `roll_core.runtime.weights`.
"""

from __future__ import annotations

import builtins
import dataclasses
import enum
import importlib
import types
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

import msgpack
import numpy as np

from roll_core.errors import RollError, UnsupportedError

TUPLE, SET, ARRAY, NUMBER, RECORD, ERROR, NAME, PATH, ENUM = range(1, 10)
_LARGEST = 2**32 - 1
"""Maximum size of one value in bytes: MessagePack's own limit."""


def dumps(value: Any) -> bytes:
    """Serialize a value. Raises `UnsupportedError` with the type of a value that the schema does not support."""
    try:
        packed: bytes = msgpack.packb(value, default=_extension, strict_types=True)
    except (TypeError, ValueError, OverflowError, UnicodeEncodeError) as error:
        if isinstance(error, UnsupportedError):
            raise
        raise UnsupportedError(f"it has no place in the schema between Python environments: {error}") from error
    return packed


def loads(data: bytes) -> Any:
    """Inverse of `dumps`.

    Arrays are writable. Raises `UnsupportedError` for a value that this environment cannot rebuild.
    """
    return msgpack.unpackb(
        data,
        ext_hook=_value,
        strict_map_key=False,
        max_bin_len=_LARGEST,
        max_ext_len=_LARGEST,
        max_str_len=_LARGEST,
        max_array_len=_LARGEST,
        max_map_len=_LARGEST,
    )


def _extension(value: Any) -> Any:
    """Encode a value that MessagePack itself does not support."""
    match value:
        case tuple():
            return _packed(TUPLE, list(value))
        case set() | frozenset():
            return _packed(SET, list(value))
        case np.ndarray():
            return _packed(ARRAY, _array(value))
        case np.generic():
            return _packed(NUMBER, _array(np.asarray(value)))
        case enum.Enum():
            return _packed(ENUM, [name_of(type(value)), value.value])
        case BaseException():
            return _packed(ERROR, _error(value))
        case PurePath():
            return _packed(PATH, str(value))
        case type() | types.FunctionType() | types.BuiltinFunctionType():
            return _packed(NAME, name_of(value))
        case Mapping():
            return dict(value)
        case str() | int() | float():
            return _plain(value)
        case _ if dataclasses.is_dataclass(value):
            fields = {each.name: getattr(value, each.name) for each in dataclasses.fields(value) if each.init}
            return _packed(RECORD, [name_of(type(value)), fields])
    kind = type(value)
    raise UnsupportedError(f"{kind.__module__}.{kind.__qualname__} has no place in the schema between environments")


def _plain(value: str | int | float) -> str | int | float:
    """Plain `str`, `int` or `float` of a subclass instance. Raises `UnsupportedError` if an integer is too large."""
    for plain in (str, int, float):
        if isinstance(value, plain) and type(value) is not plain:
            return plain(value)
    raise UnsupportedError(f"the number {value} is too large for the schema between Python environments")


def _array(array: np.ndarray[Any, Any]) -> list[Any]:
    if array.dtype.hasobject or array.dtype.names:
        raise UnsupportedError(f"an array of dtype {array.dtype} has no place in the schema between environments")
    return [array.dtype.str, list(array.shape), array.tobytes()]


def _error(error: BaseException) -> list[Any]:
    kind = type(error)
    if not isinstance(error, RollError) and kind.__module__ != builtins.__name__:
        raise UnsupportedError(f"{kind.__module__}.{kind.__qualname__} may not exist in another Python environment")
    trace = error.trace if isinstance(error, RollError) else ""
    return [name_of(kind), list(error.args), trace, list(getattr(error, "__notes__", ()))]


def _value(code: int, data: bytes) -> Any:
    content = loads(data)
    match code:
        case _ if code == TUPLE:
            return tuple(content)
        case _ if code == SET:
            return set(content)
        case _ if code in (ARRAY, NUMBER):
            dtype, shape, raw = content
            array = np.frombuffer(raw, dtype=np.dtype(dtype)).reshape(shape)
            return array.copy() if code == ARRAY else array[()]
        case _ if code == PATH:
            return Path(content)
        case _ if code == NAME:
            return _found(content)
        case _ if code == ENUM:
            return _class(content[0], enum.Enum)(content[1])
        case _ if code == ERROR:
            return _remade_error(*content)
        case _ if code == RECORD:
            record = _found(content[0])
            if not (isinstance(record, type) and dataclasses.is_dataclass(record)):
                raise UnsupportedError(f"{content[0]} is no dataclass in this Python environment")
            return record(**content[1])
    raise UnsupportedError(f"extension {code} is not known: the other environment has another roll-core")


def _remade_error(name: str, args: list[Any], trace: str, notes: list[str]) -> BaseException:
    error: BaseException = _class(name, BaseException)(*args)
    if isinstance(error, RollError) and trace:
        error.trace = trace
    for note in notes:
        error.add_note(note)
    return error


def _class(name: str, base: type) -> Any:
    found = _found(name)
    if not (isinstance(found, type) and issubclass(found, base)):
        raise UnsupportedError(f"{name} is no {base.__name__} in this Python environment")
    return found


def name_of(thing: Any) -> str:
    """Return `"module:name"` of a class or function.

    Raises `UnsupportedError` if it cannot be imported by that name.
    """
    name = f"{thing.__module__}:{thing.__qualname__}"
    if "<" in name or thing.__module__ == "__main__":
        raise UnsupportedError(f"{name} cannot be found by its name from another Python environment")
    return name


def _found(name: str) -> Any:
    module, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise UnsupportedError(f"{name} is not to be had in this Python environment: {error}") from error
    return found


def _packed(code: int, value: Any) -> msgpack.ExtType:
    return msgpack.ExtType(code, dumps(value))
