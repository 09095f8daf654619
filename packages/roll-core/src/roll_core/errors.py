"""All errors that a user can see.

Each class inherits from the standard class that it refines. Its message says what failed, what was found, what was
expected and what to do. Errors cross process boundaries, so they can be pickled: all arguments are positional and go to
`Exception.__init__`. `exit_code` is that of `roll-core`: 2 for a mistake of the user's, 1 for a failure. `code` is
stable and documented in docs/errors.md; messages may change, so scripts and tests match codes.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from typing import Self


def error_text(error: object) -> str:
    """Text of an exception of third-party code, whose `__str__` may raise."""
    try:
        return str(error)
    except BaseException as problem:
        return f"its text cannot be made: {type(problem).__name__}"


def closest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """The most similar of the `known` names, for hints; empty if none has a similarity of `cutoff`, of at most 1."""
    import difflib  # only needed after a mistake

    return next(iter(difflib.get_close_matches(name, known, 1, cutoff)), "")


def install_command(*requirements: str, python: str = "") -> str:
    """Shell command that installs `requirements` for the interpreter `python`, by default that of this process.

    `pip` on the PATH may belong to another interpreter, and environments made by uv have no pip.
    """
    import importlib.machinery
    import shlex
    import shutil
    import sys
    from pathlib import Path

    interpreter = python or sys.executable
    if python or importlib.machinery.PathFinder.find_spec("pip") is None:
        command = f"uv pip install --python {shlex.quote(interpreter)}"
    elif (pip := shutil.which("pip")) and Path(pip).parent == Path(interpreter).parent:
        command = "pip install"
    else:
        command = f"{shlex.quote(interpreter)} -m pip install"
    return " ".join([command, *map(shlex.quote, requirements)])


class RollError(Exception):
    """Base class of all errors that ROLL raises."""

    code = "ROLL-X001"
    """Stable identifier of the kind of error, listed in docs/errors.md."""
    exit_code = 1
    names_worker = False
    """True if the message already names the worker or the host."""
    trace: str = ""
    """Traceback of the worker that raised the error; empty if it was raised in this process."""

    def described(self) -> str:
        """The message after its code, as users see it."""
        return f"{self.code} {self}"

    def located(self, where: str) -> Self:
        """The same error with `where` in front of its message, if it does not name its worker already."""
        if self.names_worker:
            return self
        if self.args and isinstance(self.args[0], str):
            return self._like(f"{where}: {self.args[0]}", *self.args[1:])
        return self._like(*self.args)

    def _like(self, *args: object) -> Self:
        copy = type(self)(*args)
        copy.trace = self.trace
        for note in getattr(self, "__notes__", ()):
            copy.add_note(note)
        return copy


def one_line(error: BaseException) -> str:
    """Class and message of an exception on one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """The exception and its causes, first cause last, without duplicates (an exception can be its own cause)."""
    met: set[int] = set()
    while error is not None and id(error) not in met:
        met.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


# -- configuration -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ConfigProblem:
    """One mistake in a configuration, with its position."""

    where: str
    """`file:line:column`, `command line`, `overrides` (Python API), or the name of the config if the value
    was not written anywhere."""
    key: str
    """Dotted path of the key, `actor_train.training_args.learning_rate`."""
    message: str
    """The value found and the value expected."""
    hint: str = ""
    """What to do: the most similar key, or the smallest valid change."""
    code: str = "ROLL-C001"
    """One of `CONFIG_CODES`, or the code of the error that caused the problem."""

    def __str__(self) -> str:
        subject = f"{self.key}: " if self.key else ""
        hint = f"\n    {self.hint}" if self.hint else ""
        return f"{self.where}: {self.code} {subject}{self.message}{hint}"


CONFIG_CODES = {
    "ROLL-C010": "Unknown key.",
    "ROLL-C011": "Missing key or value.",
    "ROLL-C012": "A key that YAML does not read as text, or with characters that are not allowed.",
    "ROLL-C013": "A value of the wrong type, out of range, or not among the choices.",
    "ROLL-C014": "Values that contradict each other or a rule of the schema.",
    "ROLL-C015": "A key that nothing uses.",
    "ROLL-C016": "A value that contradicts what the strategy's config computes.",
    "ROLL-C017": "The named part cannot do what its role needs.",
    "ROLL-C018": "The model does not fit the strategy's config.",
    "ROLL-C019": "Slots, ranks and replicas do not fit together.",
    "ROLL-C020": "A config file that cannot be read.",
    "ROLL-C021": "Not valid YAML, or YAML that a config cannot contain.",
    "ROLL-C022": "A key given twice.",
    "ROLL-C023": "Fragments that cannot be composed.",
    "ROLL-C024": "An interpolation that cannot be resolved.",
    "ROLL-C025": "An override that cannot be applied.",
    "ROLL-C030": "Trainer and engine have no usable weight transport in common.",
    "ROLL-C040": "A file or directory that the config names is missing or unusable.",
    "ROLL-C041": "A reward does not fit the data, or code of the user cannot be used.",
    "ROLL-C050": "A warning: the config is valid, but a value has a probably unintended effect.",
    "ROLL-C051": "A warning: a hyper-parameter outside the range of papers and other frameworks.",
}
"""Kinds of problems in a configuration, by code."""


class ConfigError(RollError, ValueError):
    """The configuration is invalid. Lists every problem, not only the first."""

    code = "ROLL-C001"
    exit_code = 2

    def __init__(self, problems: Sequence[ConfigProblem]) -> None:
        super().__init__(tuple(problems))

    @property
    def problems(self) -> tuple[ConfigProblem, ...]:
        """All problems, in the order of the file."""
        problems: tuple[ConfigProblem, ...] = self.args[0]
        return problems

    def __str__(self) -> str:
        return "\n".join(str(problem) for problem in self.problems)

    def described(self) -> str:
        """The problems, each with its own code."""
        return str(self)


class PlacementError(RollError, ValueError):
    """The cluster does not have the slots of a `device_mapping`. Names the role, the slot and the existing slots."""

    code = "ROLL-C002"
    exit_code = 2


class PythonEnvironmentError(RollError, OSError):
    """The Python environment of a role cannot be used or created. Names role, host, package and command."""

    code = "ROLL-C003"
    exit_code = 2
    names_worker = True


# -- plugins -----------------------------------------------------------------------------------------------------------


class PluginError(RollError):
    """A plugin is invalid or failed."""

    code = "ROLL-P001"
    exit_code = 2


class PluginLoadError(PluginError, ImportError):
    """A plugin cannot be imported, or violates the plugin contract. The cause is chained."""

    code = "ROLL-P002"


class ContractError(PluginError, ValueError):
    """A plugin, or a callback of a run, does not fit the plugin API. Names the field and the valid values."""

    code = "ROLL-P003"


class UnknownProviderError(PluginError, LookupError):
    """No loaded plugin offers a name in the config."""

    code = "ROLL-P004"


class ProviderConflictError(PluginError, LookupError):
    """Two packages offer the same name. Names both, and how to choose."""

    code = "ROLL-P005"


class MissingRequirementError(PluginError, ImportError):
    """A package that the selected part needs is not installed, or has the wrong version."""

    code = "ROLL-P006"


class PluginHookError(PluginError, RuntimeError):
    """An event hook of a plugin or a callback raised an exception. Names the package or the callback."""

    code = "ROLL-P007"
    exit_code = 1


class InvalidCompletionError(PluginError, ValueError):
    """The result of an engine is not a valid completion of the request. Names the engine and its package."""

    code = "ROLL-P008"
    exit_code = 1


class TrackerError(PluginError, RuntimeError):
    """A tracker failed to open, to record a step or to close. Names the tracker."""

    code = "ROLL-P009"
    exit_code = 1


class EnvironmentsFailedError(PluginError, RuntimeError):
    """Too many episodes failed in a row. Names the environment, its package and the last failure."""

    code = "ROLL-P010"
    exit_code = 1


# -- data, models, rewards ---------------------------------------------------------------------------------------------


class DataError(RollError, ValueError):
    """Rows, templates or tokens are unusable. Names the file, the row and the column."""

    code = "ROLL-D001"
    exit_code = 2


class ModelError(RollError, ValueError):
    """A model cannot be loaded or created, or cannot do what the role needs."""

    code = "ROLL-M001"
    exit_code = 2


class UnsupportedError(RollError, ValueError):
    """A part does not support what was requested. Names what does."""

    code = "ROLL-M002"
    exit_code = 2


class ExtensionError(RollError, RuntimeError):
    """Sources of a package cannot be compiled on this host. The message ends with the compiler's output."""

    code = "ROLL-M003"


class NotBuiltError(RollError, AttributeError):
    """A strategy was called before its model was built."""

    code = "ROLL-M004"


class NonFiniteError(RollError, ArithmeticError):
    """A loss, gradient or logprob is NaN or infinite. Names the first one."""

    code = "ROLL-M005"


# -- workers -----------------------------------------------------------------------------------------------------------


class WorkerError(RollError, RuntimeError):
    """A method of a worker failed. The message begins with role, rank and host, and has the worker's traceback."""

    code = "ROLL-W001"
    names_worker = True

    def __init__(self, role: str, rank: int, host: str, method: str, cause: str, trace: str = "") -> None:
        super().__init__(role, rank, host, method, cause, trace)
        self.role, self.rank, self.host, self.method, self.cause, self.trace = role, rank, host, method, cause, trace

    def __str__(self) -> str:
        return f"{self.role} rank {self.rank} on {self.host}: {self.method} failed: {self.cause}"


class WorkerDiedError(WorkerError):
    """A worker's process exited."""

    code = "ROLL-W002"

    def __str__(self) -> str:
        when = f"during {self.method}" if self.method else "between two calls"
        return f"{self.role} rank {self.rank} on {self.host} exited {when}: {self.cause}"


class WorkerHungError(WorkerDiedError):
    """A busy worker missed its heartbeats and was killed. Its traceback shows where it hung."""

    code = "ROLL-W003"

    def __str__(self) -> str:
        return f"{self.role} rank {self.rank} on {self.host} was killed: {self.cause}"


class EngineDiedError(RollError, RuntimeError):
    """The processes of an inference engine exited. Its worker cannot restart them, so it counts as dead."""

    code = "ROLL-W004"


class WorkerTimeoutError(RollError, TimeoutError):
    """A call exceeded its deadline. Names every rank without a result, and its host."""

    code = "ROLL-W005"
    names_worker = True

    def __init__(self, role: str, method: str, seconds: float, ranks: Sequence[int], hosts: Sequence[str] = ()) -> None:
        """`ranks`: the ranks without a result. `hosts`: their hosts, in the same order."""
        super().__init__(role, method, seconds, tuple(ranks), tuple(hosts))
        self.role, self.method, self.seconds = role, method, seconds
        self.ranks, self.hosts = tuple(ranks), tuple(hosts)

    def __str__(self) -> str:
        by_host: dict[str, list[str]] = {}
        for rank, host in zip_longest(self.ranks, self.hosts, fillvalue=""):
            by_host.setdefault(f" on {host}" if host else "", []).append(str(rank))
        ranks = "; ".join(f"rank {', '.join(ranks)}{where}" for where, ranks in by_host.items())
        return f"{self.role}: {self.method} got no result within {self.seconds:g} s from {ranks}"


# -- weight sync -------------------------------------------------------------------------------------------------------


class WeightSyncError(RollError, RuntimeError):
    """Received weights differ from the weights that were sent. Subclasses name the role, the rank and the tensor."""

    code = "ROLL-S001"

    loaded: bool = False
    """True if engines loaded everything that they received. Otherwise their weights may be a mix of two versions."""


class MissingTensorError(WeightSyncError):
    """The receiver does not have a tensor of the manifest."""

    code = "ROLL-S002"


class UnexpectedTensorError(WeightSyncError):
    """The receiver got a tensor that is not in the manifest, or that its model does not have."""

    code = "ROLL-S003"


class CorruptTensorError(WeightSyncError):
    """A tensor's digest, shape or dtype differs between sender and receiver."""

    code = "ROLL-S004"


class StaleWeightsError(WeightSyncError):
    """The receiver has, or got, an older weight version than the published one."""

    code = "ROLL-S005"


class NonFiniteWeightError(WeightSyncError, ArithmeticError):
    """A tensor to be published in fp8 has values that are NaN or infinite."""

    code = "ROLL-S006"


class WeightsUnchangedError(WeightSyncError):
    """Weights were published after an optimizer step, but none differs from the previous version."""

    code = "ROLL-S007"


class ReceiverTimeoutError(WeightSyncError, TimeoutError):
    """Receivers did not confirm the weights in time."""

    code = "ROLL-S008"

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        """`ranks`: those known to have timed out."""
        super().__init__(message, tuple(ranks))
        self.message, self.ranks = message, tuple(ranks)

    def __str__(self) -> str:
        return self.message


# -- runs --------------------------------------------------------------------------------------------------------------


class GuardTrippedError(RollError, RuntimeError):
    """A guard ended the run. `guard` is its id in the docs."""

    code = "ROLL-R001"

    def __init__(self, guard: str, message: str) -> None:
        super().__init__(guard, message)
        self.guard, self.message = guard, message

    def located(self, where: str) -> Self:
        """See `RollError.located`."""
        return self._like(self.guard, f"{where}: {self.message}")

    def __str__(self) -> str:
        return f"guard {self.guard}: {self.message}"


class CheckpointError(RollError, RuntimeError):
    """A checkpoint is missing, incomplete or damaged. Names the file, and the last valid checkpoint if any."""

    code = "ROLL-R002"


class NoCheckpointError(CheckpointError, FileNotFoundError):
    """There is no checkpoint from which the run can be resumed."""

    code = "ROLL-R003"
    exit_code = 2


class CheckpointMismatchError(CheckpointError, ValueError):
    """A valid checkpoint does not fit this config. Names the difference and a remedy."""

    code = "ROLL-R004"
    exit_code = 2


class RunDirectoryError(RollError, OSError):
    """A run directory cannot be created, or a path is not a run directory. Names the path."""

    code = "ROLL-R005"
    exit_code = 2


class RunFileError(RollError, OSError):
    """A file of a run cannot be written or was deleted during the run. Names the file."""

    code = "ROLL-R006"


class RecordingError(RollError, ValueError):
    """Recorded rollouts are missing, damaged, or do not fit the config."""

    code = "ROLL-R007"
    exit_code = 2


class RewardFailure(RollError, RuntimeError):
    """Raised by a reward that cannot be computed, for example after a service returned 500. It never counts as 0."""

    code = "ROLL-D002"


class EnvironmentFailure(RollError, RuntimeError):
    """An episode failed in its environment: an exception, a timeout, an invalid result. It never counts as 0."""

    code = "ROLL-D003"


class RunInterruptedError(RollError, KeyboardInterrupt):
    """The run was interrupted by Ctrl-C, or by SIGTERM if the step could not be saved."""

    code = "ROLL-R008"
    exit_code = 130


class RunPreemptedError(RunInterruptedError):
    """SIGTERM ended the run, and all its steps are in a checkpoint. Start it again to continue."""

    code = "ROLL-R009"
    exit_code = 75  # EX_TEMPFAIL of sysexits.h: try again later
