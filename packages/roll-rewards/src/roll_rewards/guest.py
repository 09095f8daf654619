"""Code that runs inside a box, next to an untrusted program: nothing here is trusted with a grade.

The first frame on standard input is the job. Its text `announce` is written to standard error before the program runs.

- `script`: run a program. It reads the rest of standard input and writes to standard output.
- `serve`: load a program as the module `solution`, then call its functions. Requests and replies are frames.
- `tests`: run test code against a program that is served in *another* box. Only values cross: a name of the program
  is a `Remote` here, and what its calls return are plain values of this process. The program can neither see the tests
  nor change how they compare.

A frame is four bytes of length and JSON. Imports only the standard library; also runs by `python -c` in containers.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib
import json
import os
import signal
import struct
import sys
import threading
import traceback
import types
from typing import Any

MAX_FRAME = 8 << 20
RECURSION_LIMIT = 50_000
"""LiveCodeBench's. Python's own, 1,000, ends right solutions that recurse over their input."""
PRELUDE = (
    *("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics"),
    *("itertools", "functools", "operator", "io", "sys", "json", "typing"),
)
"""Modules whose names programs may use without an import, as in LiveCodeBench's harness; later ones win."""
PLAIN = (bool, int, float, str, type(None))


def main() -> None:
    """Run the job that the first frame describes, and exit."""
    job = receive(0)
    if "announce" in job:
        _fork_program(job["wall_s"])
        os.write(2, job["announce"].encode("ascii"))
    code = {"script": script, "serve": serve, "tests": tests}[job["mode"]](job)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _fork_program(wall_s: float) -> None:
    """Return in a child process. This process ends with it, or after `wall_s`.

    A container runs until its first process ends, also when the command that started it is killed.
    """
    child = os.fork()
    if not child:
        return

    def end(*_: object) -> None:
        os.kill(child, signal.SIGKILL)
        os._exit(128 + signal.SIGKILL)

    nothing = os.open("/dev/null", os.O_RDWR)
    for fd in range(3):  # they close with the program
        os.dup2(nothing, fd)
    signal.signal(signal.SIGALRM, end)  # the first process of a container ignores signals without a handler
    signal.setitimer(signal.ITIMER_REAL, wall_s)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code < 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else 128 - code)


def receive(fd: int) -> dict[str, Any]:
    """Read a frame. Raises `EOFError` if the other side has closed."""
    message: dict[str, Any] = json.loads(_read(fd, struct.unpack("!I", _read(fd, 4))[0]))
    return message


def send(fd: int, message: dict[str, Any]) -> None:
    """Write a frame. Raises `ValueError` if it is too large."""
    payload = json.dumps(message).encode("ascii")
    if len(payload) > MAX_FRAME:
        raise ValueError(f"a value of {len(payload)} bytes, expected at most {MAX_FRAME}")
    data = memoryview(struct.pack("!I", len(payload)) + payload)
    while data:
        data = data[os.write(fd, data) :]


def _read(fd: int, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = os.read(fd, min(size - len(parts), 1 << 16))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)


# -- programs ----------------------------------------------------------------------------------------------------------


def script(job: dict[str, Any]) -> int:
    """Run a program as `__main__`; returns its exit code."""
    _open_streams()
    return run("__main__", job["source"])[0]


def run(name: str, source: str) -> tuple[int, types.ModuleType]:
    """Execute a source text as a module; returns the exit code and the module."""
    module = types.ModuleType(name)
    sys.modules[name] = module
    vars(builtins).setdefault("exit", sys.exit)  # the interpreter runs without the module `site`, which has them
    vars(builtins).setdefault("quit", sys.exit)
    _lift_limit_of_digits()
    sys.setrecursionlimit(RECURSION_LIMIT)
    code = 0
    try:
        tree = ast.parse(source, "<program>")
        vars(module).update(prelude(undefined_names(tree)))
        exec(compile(tree, "<program>", "exec"), module.__dict__)
        if name == "__main__":
            for thread in threading.enumerate():
                if thread is not threading.current_thread() and not thread.daemon:
                    thread.join()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc(limit=-3)
        code = 1
    return code & 0xFF, module


def _lift_limit_of_digits() -> None:
    if hasattr(sys, "set_int_max_str_digits"):  # a container may have an older interpreter
        sys.set_int_max_str_digits(0)


def undefined_names(tree: ast.AST) -> set[str]:
    """Names that a module reads, but neither binds anywhere nor has as builtins."""
    read, bound = set[str](), set(dir(builtins))
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            (read if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).partition(".")[0])
    return read - bound


def prelude(names: set[str]) -> dict[str, Any]:
    """Values of those names that LiveCodeBench's harness imports before a program; modules first, then their contents.

    Imports nothing if there are no names.
    """
    defined: dict[str, Any] = {}
    for name in PRELUDE if names else ():
        module = importlib.import_module(name)
        public = getattr(module, "__all__", None) or [name for name in vars(module) if name[0] != "_"]
        defined |= {name: getattr(module, name) for name in names.intersection(public)}
    return defined | {name: sys.modules[name] for name in names.intersection(PRELUDE)}


def _own_connection() -> tuple[int, int]:
    """Move standard input and output elsewhere, so that prints of the program do not get between frames."""
    connection = os.dup(0), os.dup(1)
    nothing = os.open("/dev/null", os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    _open_streams()
    return connection


def _open_streams() -> None:
    """Let the standard streams use their descriptors, which the box has replaced."""
    for name, fd, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        errors = "backslashreplace" if fd == 2 else "surrogateescape"
        setattr(sys, name, open(fd, mode, encoding="utf-8", errors=errors, closefd=False))  # noqa: SIM115


def serve(job: dict[str, Any]) -> int:
    """Load a program and answer requests until the connection ends."""
    source, sink = _own_connection()
    code, module = run("solution", job["source"])
    names = {} if code else {name: callable(value) for name, value in vars(module).items() if name[:2] != "__"}
    send(sink, {"id": job["id"], "names": names, "exit": code})
    handles: list[Any] = []
    while True:
        try:
            request = receive(source)
        except EOFError:
            return 0
        arguments: list[Any] = []
        try:
            reply = {"value": encode(_perform(module, handles, request, arguments), handles)}
            if any(isinstance(argument, (list, dict, set)) for argument in arguments):
                reply["arguments"] = encode(arguments, handles)
            send(sink, {"id": request["id"], **reply})
        except BaseException as error:  # of the program
            kinds = [base.__name__ for base in type(error).__mro__]
            send(sink, {"id": request["id"], "raised": kinds, "message": _message(error)[:500]})


def call(job: dict[str, Any]) -> None:
    """Load a program, call one of its functions and write the reply as JSON. For hosts without a connection."""
    _, sink = _own_connection()
    _, module = run("solution", job["source"])
    try:
        reply = {"value": encode(_perform(module, [], job, []), [])}
    except BaseException as error:  # of the program
        reply = {"raised": type(error).__name__, "message": _message(error)[:500]}
    with open(sink, "w", encoding="ascii") as file:
        json.dump(reply, file)
    os._exit(0)


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as problem:
        return f"<its text raises {type(problem).__name__}>"


def _perform(module: types.ModuleType, handles: list[Any], request: dict[str, Any], arguments: list[Any]) -> Any:
    target, action = request["target"], request["action"]
    if isinstance(target, str):
        if target not in vars(module) and hasattr(vars(module).get("Solution"), target):
            thing = getattr(module.Solution(), target)  # the way in which LeetCode's problems are posed
        else:
            thing = getattr(module, target)
    else:
        thing = handles[target]
    arguments += decode(request["arguments"], handles.__getitem__)
    options = decode(request.get("options", {"d": []}), handles.__getitem__)
    if action == "call":
        return thing(*arguments, **options)
    if action == "get":
        return getattr(thing, *arguments)
    if action == "item":
        return thing[arguments[0]]
    if action == "in":
        return arguments[0] in thing
    if action == "iter":
        return list(thing)
    if action == "bool":
        return bool(thing)
    return len(thing) if action == "len" else str(thing)


# -- values ------------------------------------------------------------------------------------------------------------


def encode(value: Any, handles: list[Any]) -> Any:
    """JSON for a plain value; any other object is kept in `handles` and named by its index."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >> 63:
        return {"i": hex(value)}
    if isinstance(value, bool) or value is None:
        return value
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, (bytes, bytearray)):
        return {"b": value.hex()}
    if isinstance(value, complex):
        return {"c": [value.real, value.imag]}
    if isinstance(value, list):
        return [encode(item, handles) for item in value]
    for key, kinds in (("t", tuple), ("s", set), ("z", frozenset)):
        if isinstance(value, kinds):
            return {key: [encode(item, handles) for item in value]}
    if isinstance(value, dict):
        return {"d": [[encode(key, handles), encode(item, handles)] for key, item in value.items()]}
    if isinstance(value, Remote):
        return {"o": value._target}
    handles.append(value)
    return {"o": len(handles) - 1}


def decode(data: Any, resolve: Any) -> Any:
    """The value of `encode`. `resolve` returns the object with an index or a name."""
    if isinstance(data, list):
        return [decode(item, resolve) for item in data]
    if not isinstance(data, dict):
        return data
    ((key, inner),) = data.items()
    if key == "i":
        return int(inner, 16)
    if key == "b":
        return bytes.fromhex(inner)
    if key == "c":
        return complex(*inner)
    if key == "d":
        return {decode(name, resolve): decode(item, resolve) for name, item in inner}
    if key == "o":
        return resolve(inner)
    return {"t": tuple, "s": set, "z": frozenset}[key](decode(item, resolve) for item in inner)


# -- tests -------------------------------------------------------------------------------------------------------------


class Remote:
    """A function or object of the program under test, which runs in another box.

    Two of them are equal only if they are the same, so that the program cannot decide a comparison.
    """

    def __init__(self, target: Any, request: Any) -> None:
        self._target, self._request = target, request

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Call it in its box."""
        return self._request(self._target, "call", arguments, options)

    def __getattr__(self, name: str) -> Any:
        if name[:2] == "__":
            raise AttributeError(name)
        return self._request(self._target, "get", (name,))

    def __iter__(self) -> Any:
        return iter(self._request(self._target, "iter", ()))

    def __len__(self) -> int:
        return int(self._request(self._target, "len", ()))

    def __bool__(self) -> bool:
        return self._request(self._target, "bool", ()) is True

    def __reversed__(self) -> Any:
        # At once: an IndexError of the program would end a lazy iteration as if all had been compared.
        return iter([self[index] for index in range(len(self) - 1, -1, -1)])

    def __getitem__(self, key: Any) -> Any:
        return self._request(self._target, "item", (key,))

    def __contains__(self, value: Any) -> bool:
        return self._request(self._target, "in", (value,)) is True

    def __str__(self) -> str:
        return str(self._request(self._target, "str", ()))


class UnusableTest(Exception):
    """A test of the row that cannot be run here. It must not count as passed, nor as failed."""


class BrokenConnection(BaseException):
    """The program under test exited. No `except Exception` of a test catches it."""


class _Checks(ast.NodeTransformer):
    """Counts the checks that test code makes: assertions, or all comparisons in code without assertions.

    A program can end a loop of the tests early, for example by an empty list, so "nothing was raised" is no proof.
    """

    NAME = "__checked__"
    """Name in the test code of the function that counts and returns its argument."""

    def __init__(self, tree: ast.Module) -> None:
        self.num_made = 0
        self._kinds: tuple[type[ast.expr], ...] = ()
        if not any(isinstance(node, ast.Assert) or self._is_assertion(node) for node in ast.walk(tree)):
            self._kinds = (ast.Compare,)
        self.are_expected = False
        self.visit(tree)
        ast.fix_missing_locations(tree)

    def made(self, value: Any) -> Any:
        """Count a check and return its argument."""
        self.num_made += 1
        return value

    def visit_Assert(self, node: ast.Assert) -> ast.Assert:
        """Count the condition once it has a value."""
        self.generic_visit(node)
        node.test = self._counted(node.test)
        return node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        """Count assertions of unittest and numpy, which are functions."""
        self.generic_visit(node)
        return self._counted(node) if self._is_assertion(node) else node

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        """Count it in code without assertions."""
        self.generic_visit(node)
        return self._counted(node) if self._kinds else node

    @staticmethod
    def _is_assertion(node: ast.AST) -> bool:
        function = node.func if isinstance(node, ast.Call) else None
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        return name.lower().startswith("assert")

    def _counted(self, node: ast.expr) -> ast.expr:
        self.are_expected = True
        return ast.Call(ast.Name(self.NAME, ast.Load()), [node], [])


def tests(job: dict[str, Any]) -> int:
    """Run test code: it passes if neither the module nor one of its `test_` functions raises."""
    source, sink = _own_connection()
    _lift_limit_of_digits()
    sys.path += job["paths"]
    calls: list[Any] = []
    raised: list[BaseException] = []

    def request(target: Any, action: str, arguments: Any, options: Any = None) -> Any:
        calls.append(target)
        mutable = [argument for argument in arguments if isinstance(argument, (list, dict, set))]
        message = {"target": target, "action": action, "arguments": encode(list(arguments), [])}
        send(sink, message | ({"options": encode(options, [])} if options else {}))
        try:
            reply = receive(source)
        except EOFError as error:
            raise BrokenConnection from error
        if "raised" in reply:
            raised.append(_exception(reply["raised"], reply["message"]))
            raise raised[-1]
        if mutable and "arguments" in reply:
            for argument, changed in zip(
                arguments, decode(reply["arguments"], lambda handle: Remote(handle, request)), strict=True
            ):
                _update(argument, changed)
        return decode(reply["value"], lambda handle: Remote(handle, request))

    result: dict[str, Any] = {"passed": False, "broken": False}
    try:
        tree = ast.parse(job["source"])
        checks = _Checks(tree)
        _run_tests(job, tree, checks, request)
        if not calls:
            result |= {"why": "the tests call nothing of the program", "broken": True}
        elif checks.are_expected and not checks.num_made and not raised:  # an exception that they expected is a check
            result["why"] = "the tests compared nothing"
        else:
            result["passed"] = True
    except BaseException as error:
        result["why"] = f"{type(error).__name__}: {_message(error)}"[:300]
        # Once the program was called, its values may have made the tests evaluate or import something.
        broken = (SyntaxError, ModuleNotFoundError, UnusableTest) if not calls else UnusableTest
        result["broken"] = error not in raised and (isinstance(error, broken) or _is_missing(error, job["source"]))
    send(sink, result)
    return 0


def _is_missing(error: BaseException, source: str) -> bool:
    """True if the tests import a module that this host lacks."""
    if not isinstance(error, ModuleNotFoundError):
        return False
    imports = [node for node in ast.walk(ast.parse(source)) if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = {getattr(node, "module", None) or node.names[0].name for node in imports}
    return (error.name or "").partition(".")[0] in {name.partition(".")[0] for name in names}


def _run_tests(job: dict[str, Any], tree: ast.Module, checks: _Checks, request: Any) -> None:
    stored = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    known = set(dir(builtins)) | stored
    usable = [name for name, is_callable in job["names"].items() if is_callable and name.isidentifier()]
    solution = types.ModuleType("solution")
    functions = {name: Remote(name, request) for name in usable if name not in known and name[:2] != "__"}
    vars(solution).update(functions)
    sys.modules["solution"] = sys.modules["main"] = solution
    unknown = undefined_names(tree) - functions.keys()
    names: dict[str, Any] = {"__name__": "tests", **prelude(unknown), checks.NAME: checks.made, **functions}
    if job["entry"]:
        names["candidate"] = Remote(job["entry"], request)
    exec(compile(tree, "<tests>", "exec"), names)
    if job["entry"] and callable(names.get("check")) and not isinstance(names["check"], Remote):
        names["check"](names["candidate"])  # the way in which HumanEval's tests are written
    for name, value in list(names.items()):
        if isinstance(value, type) and value.__module__ == "tests" and _has_tests(name, value):
            raise UnusableTest(f"{name} is a class of tests, expected functions")
        if name.startswith("test_") and isinstance(value, types.FunctionType):
            for arguments in _parameters(value):
                _check_arguments(name, value, arguments)
                if isinstance(result := value(**arguments), (types.CoroutineType, types.GeneratorType)):
                    result.close()
                    raise UnusableTest(f"{name} is a coroutine or a generator function, expected a plain one")


def _has_tests(name: str, candidate: type) -> bool:
    """True for a class whose methods pytest runs."""
    is_named = name.startswith("Test") or any(base.__name__ == "TestCase" for base in candidate.__mro__)
    return is_named and any(
        attribute.startswith("test") and callable(getattr(candidate, attribute)) for attribute in dir(candidate)
    )


def _check_arguments(name: str, function: types.FunctionType, arguments: dict[str, Any]) -> None:
    code, defaults = function.__code__, function.__defaults__ or ()
    required = set(code.co_varnames[: code.co_argcount - len(defaults)])
    if missing := required - arguments.keys():
        raise UnusableTest(f"{name} needs {', '.join(sorted(missing))}: fixtures are not supported")


def _parameters(function: Any) -> list[dict[str, Any]]:
    """Arguments of each call of a test function: those of pytest's `parametrize`."""
    parameters: list[dict[str, Any]] = [{}]
    for mark in getattr(function, "pytestmark", []):
        if mark.name == "parametrize":
            names, rows = mark.args[:2]
            names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
            values = [row if len(names) > 1 else (row,) for row in (getattr(row, "values", row) for row in rows)]
            parameters = [{**known, **dict(zip(names, row, strict=True))} for known in parameters for row in values]
    return parameters


def _exception(kinds: list[str], message: str) -> BaseException:
    known_kinds = [known for kind in kinds if isinstance(known := getattr(builtins, kind, None), type)]
    if any(issubclass(known, (StopIteration, StopAsyncIteration)) for known in known_kinds):
        return RuntimeError(message)  # it would end a loop of the test early, as if all had been compared
    for known in known_kinds:
        if issubclass(known, Exception):
            try:
                return known(message)
            except TypeError:  # it needs more arguments, for example UnicodeDecodeError
                continue
    return BrokenConnection(f"{kinds[0]}: {message}")


def _update(target: Any, changed: Any) -> None:
    """Let a mutable argument become what the program made of it."""
    if isinstance(target, list) and isinstance(changed, list):
        target[:] = changed
    elif isinstance(target, (dict, set)) and type(target) is type(changed):
        target.clear()
        target.update(changed)
