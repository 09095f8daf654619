"""Reads the calls of a Python script without running it: literals, and names that were assigned before.

The statements are followed in their order, in `main()` and below `if __name__ == "__main__":` as well. What the script
computes when it runs is a `Computed` value with the reason and the line.
"""

from __future__ import annotations

import ast
import operator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from roll_core.errors import ConfigError, ConfigProblem

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

MAX_FILE = 1_000_000
"""Bytes of a script."""


@dataclass(frozen=True, slots=True)
class Computed:
    """A value that is known only when the script runs."""

    why: str
    where: str


@dataclass(frozen=True, slots=True)
class Named:
    """A function, class or module, by its name."""

    module: str
    name: str = ""
    """Empty for a module."""
    local: bool = False
    """True if the script itself defines it."""

    @property
    def target(self) -> str:
        """`module:name`."""
        return f"{self.module}:{self.name}"


@dataclass(slots=True)
class Call:
    """A call that is not run."""

    name: str
    """Last component of the function's name, or `[]` for an item."""
    of: Any
    """The object that has the method, or None."""
    args: list[Any]
    kwargs: dict[str, Any]
    where: str
    places: dict[str, str] = field(default_factory=dict)
    """`file:line` of each keyword argument."""
    guarded: bool = True
    """False if importing the script as a module runs this call."""


_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}
_CASTS: dict[str, Callable[..., Any]] = {"int": int, "float": float, "str": str, "bool": bool}


class PythonReader:
    """Follows a script and collects its calls."""

    def __init__(self, path: Path) -> None:
        """Read the script. Raises `ConfigError` if it is no Python."""
        self.path, self.calls = path, []
        self._names: dict[str, Any] = {"__name__": "__main__"}
        self._functions: dict[str, ast.FunctionDef] = {}
        self._following: set[str] = set()
        self._guarded = False
        try:
            if path.stat().st_size > MAX_FILE:
                raise _refused(str(path), f"is larger than {MAX_FILE:,} bytes")
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise _refused(str(path), f"cannot be read: {error.strerror}") from error
        except SyntaxError as error:
            raise _refused(f"{path}:{error.lineno}", f"is no Python: {error.msg}") from error
        except (ValueError, RecursionError) as error:
            raise _refused(str(path), f"is no Python: {error}") from error
        try:
            self._block(tree.body)
        except RecursionError as error:
            raise _refused(str(path), "has expressions that are nested too deeply") from error

    calls: list[Call]
    """Calls in the order in which they are evaluated."""

    # -- statements ----------------------------------------------------------------------------------------------------

    def _block(self, statements: Sequence[ast.stmt]) -> None:
        for statement in statements:
            self._statement(statement)

    def _statement(self, statement: ast.stmt) -> None:
        match statement:
            case ast.Import(names=names):
                for alias in names:
                    module = alias.name if alias.asname else alias.name.partition(".")[0]
                    self._names[alias.asname or module] = Named(module)
            case ast.ImportFrom(module=module, names=names):
                for alias in names:
                    self._names[alias.asname or alias.name] = Named(module or "", alias.name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                self._names[name] = Named(self.path.stem, name, local=True)
                if isinstance(statement, ast.FunctionDef):
                    self._functions[name] = statement
            case ast.Assign(targets=targets, value=value):
                result = self.value(value)
                for target in targets:
                    self._assign(target, result)
            case ast.AnnAssign(target=target, value=value) if value is not None:
                self._assign(target, self.value(value))
            case ast.Expr(value=value):
                self.value(value)
            case ast.If(test=test, body=body, orelse=orelse):
                known = self.value(test)
                if isinstance(known, bool):
                    outside = self._guarded
                    self._guarded = outside or "__name__" in ast.unparse(test)
                    self._block(body if known else orelse)
                    self._guarded = outside
                else:
                    self._forget(statement, "it depends on a branch")
            case ast.With(body=body) | ast.Try(body=body):
                self._block(body)
            case ast.AugAssign() | ast.For() | ast.While() | ast.Match() | ast.Delete():
                self._forget(statement, "it is changed by a statement that is not followed")
            case _:
                pass

    def _assign(self, target: ast.expr, value: Any) -> None:
        match target:
            case ast.Name(id=name):
                self._names[name] = value
            case ast.Attribute(value=holder, attr=name):
                call = self._names.get(holder.id) if isinstance(holder, ast.Name) else None
                if isinstance(call, Call):
                    call.kwargs[name], call.places[name] = value, self._where(target)
            case ast.Subscript(value=ast.Name(id=name), slice=index):
                mapping, key = self._names.get(name), self.value(index)
                if isinstance(mapping, dict) and isinstance(key, str):
                    mapping[key] = value
            case ast.Tuple(elts=elements) | ast.List(elts=elements):
                values = value if isinstance(value, list) and len(value) == len(elements) else None
                unknown = self._computed(target, "it is one of several results")
                for position, element in enumerate(elements):
                    self._assign(element, values[position] if values is not None else unknown)

    def _forget(self, statement: ast.stmt, why: str) -> None:
        """Make every name unknown that a statement assigns; its calls count."""
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, (ast.Store, ast.Del)):
                self._names[node.id] = self._computed(statement, why)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                self._assign(node, self._computed(statement, why))
            elif isinstance(node, ast.Call):
                self.value(node)

    # -- expressions ---------------------------------------------------------------------------------------------------

    def value(self, node: ast.expr) -> Any:
        """The value of an expression: a literal, a list or mapping of values, `Named`, `Call` or `Computed`."""
        match node:
            case ast.Constant(value=value) if value is None or isinstance(value, (str, int, float)):
                return value
            case ast.Name(id=name):
                unknown = self._computed(node, f"{name} is not assigned before, or is a parameter")
                return self._names.get(name, unknown)
            case ast.List(elts=elements) | ast.Tuple(elts=elements) | ast.Set(elts=elements):
                return [self.value(element) for element in elements]
            case ast.Dict(keys=keys, values=values) if all(isinstance(key, ast.Constant) for key in keys):
                pairs = zip(keys, values, strict=True)
                return {str(key.value): self.value(value) for key, value in pairs if isinstance(key, ast.Constant)}
            case ast.JoinedStr():
                return self._computed(node, "it is an f-string")
            case ast.UnaryOp(op=op, operand=operand):
                return self._unary(node, op, self.value(operand))
            case ast.BinOp(left=left, op=op, right=right):
                return self._binary(node, self.value(left), op, self.value(right))
            case ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]):
                sides = self.value(left), self.value(right)
                known = all(isinstance(side, (str, int, float)) for side in sides)
                return sides[0] == sides[1] if known else self._computed(node, "it is a comparison")
            case ast.Attribute(value=holder, attr=name):
                return self._attribute(node, self.value(holder), name)
            case ast.Subscript(value=holder, slice=index):
                return self._item(node, self.value(holder), self.value(index))
            case ast.Call():
                return self._call(node)
            case _:
                return self._computed(node, f"it is computed ({type(node).__name__})")

    def _unary(self, node: ast.expr, op: ast.unaryop, value: Any) -> Any:
        if isinstance(op, ast.Not) and isinstance(value, bool):
            return not value
        if isinstance(op, ast.USub) and isinstance(value, (int, float)):
            return -value
        return value if isinstance(value, Computed) else self._computed(node, "it is computed")

    def _binary(self, node: ast.expr, left: Any, op: ast.operator, right: Any) -> Any:
        for side in (left, right):
            if isinstance(side, Computed):
                return side
        compute = _OPERATORS.get(type(op))
        kinds = ((int, float), str, list)
        if compute is None or not any(isinstance(left, kind) and isinstance(right, kind) for kind in kinds):
            return self._computed(node, "it is computed")
        try:
            return compute(left, right)
        except (TypeError, ZeroDivisionError, OverflowError):
            return self._computed(node, "it is computed")

    def _attribute(self, node: ast.Attribute, holder: Any, name: str) -> Any:
        if isinstance(holder, Named) and not holder.local:
            module = holder.module if not holder.name else f"{holder.module}.{holder.name}"
            return Named(module, name)
        if isinstance(holder, Call) and name in holder.kwargs:
            return holder.kwargs[name]
        return holder if isinstance(holder, Computed) else self._computed(node, f"it is an attribute, {name}")

    def _item(self, node: ast.Subscript, holder: Any, key: Any) -> Any:
        if isinstance(holder, Call):
            return Call("[]", holder, [key], {}, self._where(node))
        if isinstance(holder, dict) and isinstance(key, str) and key in holder:
            return holder[key]
        return holder if isinstance(holder, Computed) else self._computed(node, "it is an item")

    def _call(self, node: ast.Call) -> Any:
        function = node.func
        args = [self.value(argument) for argument in node.args]
        kwargs: dict[str, Any] = {}
        places: dict[str, str] = {}
        for keyword in node.keywords:
            value = self.value(keyword.value)
            if keyword.arg is not None:
                kwargs[keyword.arg], places[keyword.arg] = value, self._where(keyword.value)
            elif isinstance(value, dict):
                kwargs |= value
                places |= dict.fromkeys(value, self._where(keyword.value))
            else:
                kwargs["**"], places["**"] = self._computed(keyword.value, "it is unpacked"), self._where(keyword.value)
        if isinstance(function, ast.Name):
            if function.id == "dict" and not args:
                return kwargs
            if function.id in _CASTS and len(args) == 1 and isinstance(args[0], (str, int, float)):
                try:
                    return _CASTS[function.id](args[0])
                except ValueError:
                    return self._computed(node, "it is computed")
        of = self.value(function.value) if isinstance(function, ast.Attribute) else None
        named = self.value(function)
        name = named.name if isinstance(named, Named) else function.attr if isinstance(function, ast.Attribute) else ""
        call = Call(name or ast.unparse(function), of, args, kwargs, self._where(node), places, self._guarded)
        self.calls.append(call)
        if isinstance(function, ast.Name):
            self._follow(function.id)
        return call

    def _follow(self, name: str) -> None:
        """Follow a function of the script, whose parameters are unknown."""
        body = self._functions.get(name)
        if body is None or name in self._following:
            return
        outside = dict(self._names)
        arguments = body.args
        for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
            self._names[argument.arg] = self._computed(body, f"{argument.arg} is a parameter of {name}")
        self._following.add(name)
        self._block(body.body)
        self._following.remove(name)
        self._names = outside

    def _computed(self, node: ast.AST, why: str) -> Computed:
        return Computed(why, self._where(node))

    def _where(self, node: ast.AST) -> str:
        return f"{self.path}:{getattr(node, 'lineno', 1)}"


def computed_in(value: Any) -> Iterator[Computed]:
    """Yield what is unknown in a value."""
    if isinstance(value, Computed):
        yield value
    elif isinstance(value, Call):
        yield Computed(f"{value.name}(…) is not run", value.where)
    elif isinstance(value, (list, dict)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from computed_in(inner)


def _refused(where: str, message: str) -> ConfigError:
    return ConfigError([ConfigProblem(where, "", message, code="ROLL-C020")])
