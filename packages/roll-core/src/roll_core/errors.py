"""Every error that a person can meet.

Each class inherits the standard class that it refines, says what was asked, what was found and what to do,
and survives pickling, because errors cross process boundaries: all arguments are positional and go to
`Exception.__init__`. `exit_code` is what `roll-core` exits with: 2 for a mistake of the user's, 1 for a failure.
`code` is stable and documented in docs/errors.md; messages may change, so scripts and tests match codes.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Self


class RollError(Exception):
    """Base of every error that ROLL raises on purpose."""

    code = "ROLL-X001"
    """Stable identifier of the kind of error, listed in docs/errors.md."""
    exit_code = 1
    trace: str = ""
    """Traceback of the worker where it was raised, empty if it was raised in this process."""

    def described(self) -> str:
        """The message after its code, as users see it."""
        return f"{self.code} {self}"

    def located(self, where: str) -> Self:
        """The same error with `where` in front of its message, for one that comes from another process."""
        if self.args and isinstance(self.args[0], str):
            return self._like(f"{where}: {self.args[0]}", *self.args[1:])
        return self._like(*self.args)

    def _like(self, *args: object) -> Self:
        copy = type(self)(*args)
        copy.trace = self.trace
        for note in getattr(self, "__notes__", ()):
            copy.add_note(note)
        return copy


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """The exception and what it came from, the first cause last, each once: one raised from itself is its own cause."""
    met: set[int] = set()
    while error is not None and id(error) not in met:
        met.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


# -- configuration -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ConfigProblem:
    """One mistake in a configuration, with everything needed to find and mend it."""

    where: str
    """`file:line:column`, `command line` or the name of the config when the value was written nowhere."""
    key: str
    """Dotted path of the key, `actor_train.training_args.learning_rate`."""
    message: str
    """What was found and what was expected."""
    hint: str = ""
    """What to do: the nearest right key, the smallest change that would be valid."""
    code: str = "ROLL-C001"
    """One of `CONFIG_CODES`, or the code of the error behind the problem."""

    def __str__(self) -> str:
        subject = f"{self.key}: " if self.key else ""
        hint = f"\n    {self.hint}" if self.hint else ""
        return f"{self.where}: {self.code} {subject}{self.message}{hint}"


CONFIG_CODES = {
    "ROLL-C010": "Unknown key.",
    "ROLL-C011": "Missing key or value.",
    "ROLL-C012": "A key that YAML does not read as text, or with characters that it cannot have.",
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
    "ROLL-C025": "An override on the command line that cannot be applied.",
    "ROLL-C030": "Trainer and engine have no usable weight transport in common.",
    "ROLL-C040": "A file or directory that the config names is missing or unusable.",
    "ROLL-C041": "A reward does not fit the data, or its code cannot be used.",
    "ROLL-C050": "A warning: the config is valid, but a value has an effect that few want.",
}
"""Kinds of problems in a configuration, by code."""


class ConfigError(RollError, ValueError):
    """A configuration that cannot be used; carries every problem that was found, not just the first."""

    code = "ROLL-C001"
    exit_code = 2

    def __init__(self, problems: Sequence[ConfigProblem]) -> None:
        super().__init__(tuple(problems))

    @property
    def problems(self) -> tuple[ConfigProblem, ...]:
        """All problems, in the order in which they stand in the file."""
        found: tuple[ConfigProblem, ...] = self.args[0]
        return found

    def __str__(self) -> str:
        return "\n".join(str(problem) for problem in self.problems)

    def described(self) -> str:
        """The problems, each with its own code."""
        return str(self)


class PlacementError(RollError, ValueError):
    """A `device_mapping` that the cluster cannot satisfy: names the role, the slot, and what exists."""

    code = "ROLL-C002"
    exit_code = 2


class PythonEnvironmentError(RollError, OSError):
    """The Python environment of a role cannot be used or made: names the role, the host, the package, the command."""

    code = "ROLL-C003"
    exit_code = 2

    def located(self, where: str) -> Self:
        """Itself: it says where it comes from."""
        return self


# -- plugins -----------------------------------------------------------------------------------------------------------


class PluginError(RollError):
    """Something is wrong with a plugin, not with ROLL and not with the model."""

    code = "ROLL-P001"
    exit_code = 2


class PluginLoadError(PluginError, ImportError):
    """A plugin could not be imported or broke the contract while it was loaded; the cause is chained."""

    code = "ROLL-P002"


class ContractError(PluginError, ValueError):
    """A plugin gave the plugin API a value that it does not have; names the field and the values that it has."""

    code = "ROLL-P003"


class UnknownProviderError(PluginError, LookupError):
    """A name in the config that no loaded plugin offers."""

    code = "ROLL-P004"


class ProviderConflictError(PluginError, LookupError):
    """A name in the config that two packages offer; names both, and the way out."""

    code = "ROLL-P005"


class MissingRequirementError(PluginError, ImportError):
    """A provider was chosen whose engine is missing or of a wrong version."""

    code = "ROLL-P006"


class PluginHookError(PluginError, RuntimeError):
    """An event hook of a plugin raised; names the package."""

    code = "ROLL-P007"
    exit_code = 1


class InvalidCompletionError(PluginError, ValueError):
    """An engine returned something that is not the completion of its request; names the engine and its package."""

    code = "ROLL-P008"
    exit_code = 1


class TrackerError(PluginError, RuntimeError):
    """A tracker could not be opened, raised while it recorded a step, or could not be closed; names the tracker."""

    code = "ROLL-P009"
    exit_code = 1


# -- data, models, rewards ---------------------------------------------------------------------------------------------


class DataError(RollError, ValueError):
    """Rows, templates or tokens that cannot be used: names the file, the row and the column."""

    code = "ROLL-D001"
    exit_code = 2


class ModelError(RollError, ValueError):
    """A model that cannot be loaded or made, or that cannot do what the role needs."""

    code = "ROLL-M001"
    exit_code = 2


class UnsupportedError(RollError, ValueError):
    """Something that a part declares it cannot do was asked of it; says what can."""

    code = "ROLL-M002"
    exit_code = 2


class ExtensionError(RollError, RuntimeError):
    """Sources that come with a package cannot be compiled here; the message ends with what the compiler said."""

    code = "ROLL-M003"


class NotBuiltError(RollError, AttributeError):
    """A strategy was called before its model was there."""

    code = "ROLL-M004"


class NonFiniteError(RollError, ArithmeticError):
    """A loss, gradient or logprob that is NaN or infinite; names where it first appeared."""

    code = "ROLL-M005"


# -- workers -----------------------------------------------------------------------------------------------------------


class WorkerError(RollError, RuntimeError):
    """A worker's method failed. The message begins with role, rank and host; the worker's traceback is kept."""

    code = "ROLL-W001"

    def __init__(self, role: str, rank: int, host: str, method: str, cause: str, trace: str = "") -> None:
        super().__init__(role, rank, host, method, cause, trace)
        self.role, self.rank, self.host, self.method, self.cause, self.trace = role, rank, host, method, cause, trace

    def located(self, where: str) -> Self:
        """Itself: it says where it comes from."""
        return self

    def __str__(self) -> str:
        return f"{self.role} rank {self.rank} on {self.host}: {self.method} failed: {self.cause}"


class WorkerDiedError(WorkerError):
    """A worker's process is gone."""

    code = "ROLL-W002"

    def __str__(self) -> str:
        when = f"during {self.method}" if self.method else "between two calls"
        return f"{self.role} rank {self.rank} on {self.host} died {when}: {self.cause}"


class WorkerHungError(WorkerDiedError):
    """A worker with work missed its heartbeats and was killed. Its trace shows where it hung."""

    code = "ROLL-W003"

    def __str__(self) -> str:
        return f"{self.role} rank {self.rank} on {self.host} was given up: {self.cause}"


class EngineDiedError(RollError, RuntimeError):
    """The processes of an inference engine are gone, while the worker that started them lives. It cannot be mended
    there: the worker counts as dead."""

    code = "ROLL-W004"


class WorkerTimeoutError(RollError, TimeoutError):
    """A call's deadline passed; names every rank that did not answer, and its host."""

    code = "ROLL-W005"

    def __init__(
        self, role: str, method: str, seconds: float, silent: Sequence[int], hosts: Sequence[str] = ()
    ) -> None:
        """`hosts` are those of the silent ranks, in their order."""
        super().__init__(role, method, seconds, tuple(silent), tuple(hosts))
        self.role, self.method, self.seconds = role, method, seconds
        self.silent, self.hosts = tuple(silent), tuple(hosts)

    def located(self, where: str) -> Self:
        """Itself: it says where it comes from."""
        return self

    def __str__(self) -> str:
        by_host: dict[str, list[str]] = {}
        for rank, host in zip_longest(self.silent, self.hosts, fillvalue=""):
            by_host.setdefault(str(host), []).append(str(rank))
        ranks = "; ".join(
            f"rank {', '.join(ranks)} on {host}" if host else f"rank {', '.join(ranks)}"
            for host, ranks in by_host.items()
        )
        return f"{self.role}: {self.method} got no answer within {self.seconds:g} s from {ranks}"


# -- weight sync -------------------------------------------------------------------------------------------------------


class WeightSyncError(RollError, RuntimeError):
    """Weights did not arrive as they were sent. Subclasses say how; each names role, rank and tensor."""

    code = "ROLL-S001"

    loaded: bool = False
    """Whether engines hold all that they were sent, even if it is not what was to be sent. Otherwise what they hold may
    be in part of one version and in part of another."""


class MissingTensorError(WeightSyncError):
    """The receiver does not hold a tensor that the manifest lists."""

    code = "ROLL-S002"


class UnexpectedTensorError(WeightSyncError):
    """The receiver was sent a tensor that the manifest does not list, or that its model does not have."""

    code = "ROLL-S003"


class CorruptTensorError(WeightSyncError):
    """A tensor's digest, shape or dtype differs between sender and receiver."""

    code = "ROLL-S004"


class StaleWeightsError(WeightSyncError):
    """The receiver holds, or was sent, an older weight version than the one published."""

    code = "ROLL-S005"


class NonFiniteWeightError(WeightSyncError, ArithmeticError):
    """A tensor that was to be published in 8 bits has values that are NaN or infinite."""

    code = "ROLL-S006"


class WeightsUnchangedError(WeightSyncError):
    """An optimizer step was published, but no weight differs from the version before."""

    code = "ROLL-S007"


class ReceiverSilentError(WeightSyncError, TimeoutError):
    """Receivers did not confirm the weights in time."""

    code = "ROLL-S008"

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        """`ranks` are those that are known to be silent."""
        super().__init__(message, tuple(ranks))
        self.message, self.ranks = message, tuple(ranks)

    def __str__(self) -> str:
        return self.message


# -- runs --------------------------------------------------------------------------------------------------------------


class GuardTrippedError(RollError, RuntimeError):
    """A guard stopped the run. `guard` is its id, under which the docs explain it."""

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
    """A checkpoint that is missing, incomplete or damaged; names the file, and the last good checkpoint if any."""

    code = "ROLL-R002"


class NoCheckpointError(CheckpointError, FileNotFoundError):
    """A run was to be resumed from where there is no checkpoint."""

    code = "ROLL-R003"
    exit_code = 2


class CheckpointMismatchError(CheckpointError, ValueError):
    """A good checkpoint from which this config cannot go on; says why, and what would."""

    code = "ROLL-R004"
    exit_code = 2


class RunDirectoryError(RollError, OSError):
    """A run directory that cannot be made, or something that is not a run directory; names the path."""

    code = "ROLL-R005"
    exit_code = 2


class RunFileError(RollError, OSError):
    """A file of a run that cannot be written or was lost: a full disk, a run directory deleted in mid-run; names the
    file."""

    code = "ROLL-R006"


class RecordingError(RollError, ValueError):
    """Recorded rollouts that are missing, damaged, or not those that the config would have had."""

    code = "ROLL-R007"
    exit_code = 2


class RewardFailure(RollError, RuntimeError):
    """Raised by a reward that could not be computed (a sandbox died, a service answered 500). It is never 0."""

    code = "ROLL-D002"


class RunInterruptedError(RollError, KeyboardInterrupt):
    """The run was stopped from outside, at once (Ctrl-C; SIGTERM where a step could not be saved)."""

    code = "ROLL-R008"
    exit_code = 130


class RunPreemptedError(RunInterruptedError):
    """The run was stopped by SIGTERM, and every step that it has done is in a checkpoint: start it again to go on."""

    code = "ROLL-R009"
    exit_code = 75  # EX_TEMPFAIL of sysexits.h: try again later
