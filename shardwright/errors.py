"""All errors raised on purpose by Shardwright.

One flat family under `ShardwrightError`. An error names the problem, its place (line, tensor, field, address) and a
remedy. Its stable `code` carries it across the wire to the same class.
"""

from __future__ import annotations

from typing import ClassVar


class ShardwrightError(Exception):
    """Base class. `message`: the problem; `where`: its place; `remedy`: the advice."""

    code: ClassVar[str] = "error"

    def __init__(self, message: str, *, where: str = "", remedy: str = "") -> None:
        self.message = message
        self.where = where
        self.remedy = remedy
        super().__init__(message)

    def __str__(self) -> str:
        text = f"{self.where}: {self.message}" if self.where else self.message
        return f"{text}\n  remedy: {self.remedy}" if self.remedy else text

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.message, self.where, self.remedy))


def add_place(error: ShardwrightError, place: str) -> ShardwrightError:
    """The same error, with an outer place in front."""
    where = f"{place}, {error.where}" if error.where else place
    return type(error)(error.message, where=where, remedy=error.remedy)


def _rebuild(cls: type[ShardwrightError], message: str, where: str, remedy: str) -> ShardwrightError:
    return cls(message, where=where, remedy=remedy)


class HloSyntaxError(ShardwrightError):
    """Unreadable HLO text; `where` is `line:column`, the message shows a caret."""

    code = "hlo_syntax"


class UnsupportedProgramError(ShardwrightError):
    """The user's function holds something that cannot travel to a server (a host callback, …)."""

    code = "unsupported_program"


class ArgumentError(ShardwrightError, TypeError):
    """Arguments of a call that a program does not take: their number, names, shapes or types."""

    code = "argument"


class OptionError(ShardwrightError):
    """An option has a wrong value, or names a feature missing in this version."""

    code = "option"


class AnnotationError(ShardwrightError):
    """An infeasible pin on a tensor; names the tensor, its shape, its line and the reason."""

    code = "annotation"


class PlanError(ShardwrightError):
    """No plan could be made, or a plan file does not fit the program it is used with."""

    code = "plan"


class MicroBatchError(PlanError):
    """A step cannot be split into micro-batches; names the instruction needing the whole batch, and its line."""

    code = "micro_batch"


class UnpartitionableError(PlanError):
    """A resharding that crashes XLA's partitioner; names the array and both shardings."""

    code = "unpartitionable"


class MemoryBudgetError(PlanError):
    """No plan fits the memory of a device; names the need, the dominant part, and remedies."""

    code = "memory_budget"


class PlanCheckError(PlanError):
    """The plan checker found a plan in violation of a rule: a defect of ours, never run."""

    code = "plan_check"


class ClusterConfigError(ShardwrightError):
    """A cluster file that is missing, malformed, unsafe, or differs between nodes."""

    code = "cluster_config"


class CompilationError(ShardwrightError):
    """XLA refused the planned program."""

    code = "compilation"


class CompilationAbortedError(CompilationError):
    """XLA ended its process while compiling the planned program; only a child died."""

    code = "compilation_aborted"


class PlatformError(ShardwrightError):
    """The installed jax/jaxlib lacks something that Shardwright needs."""

    code = "platform"


class ServerUnavailableError(ShardwrightError):
    """The server cannot be reached, or went away."""

    code = "server_unavailable"


class ServerDrainingError(ServerUnavailableError):
    """The server, or a node of it, ends soon and begins nothing new; saves and reads still work for a while."""

    code = "server_draining"


class ProtocolError(ShardwrightError):
    """A message that is none of the protocol: damaged, or of another program."""

    code = "protocol"


class AuthenticationError(ShardwrightError):
    """The server refused the token or the certificate."""

    code = "authentication"


class DeadlineError(ShardwrightError):
    """A call did not finish within its deadline."""

    code = "deadline"


class SessionError(ShardwrightError):
    """The session is unknown, closed, or was lost together with its arrays."""

    code = "session"


class ArrayError(ShardwrightError):
    """A missing remote array: released, donated, or never written."""

    code = "array"


class WorkerLostError(ShardwrightError):
    """A worker died or left; its share of the session's arrays is gone."""

    code = "worker_lost"


class ClusterChangedError(ShardwrightError):
    """The cluster has other nodes than when a program was planned; clients plan it again by themselves."""

    code = "cluster_changed"


class ResourceLimitError(ShardwrightError):
    """A message, a program or a session exceeds a limit of the server."""

    code = "resource_limit"


class ExecutionError(ShardwrightError):
    """A step failed while it ran on the workers."""

    code = "execution"


class StepTimeoutError(ExecutionError):
    """A step did not end within its time limit; the executors were replaced, and all arrays on the servers are gone.

    Names the node, the process and the device or task that did not end.
    """

    code = "step_timeout"


class StepCancelledError(ExecutionError):
    """A step was cancelled: before it ran, or while it did, after a grace."""

    code = "step_cancelled"


class RepeatedLossError(ExecutionError):
    """A step, an initializer, a program's load or a dataset ended the executors again and again: it is not run any
    more in its session. Names it.
    """

    code = "repeated_loss"


class NonFiniteError(ExecutionError, FloatingPointError):
    """A result of a step holds NaNs or infinities, while JAX's `jax_debug_nans` or `jax_debug_infs` is on.

    `result` is the step's result, in handles.
    """

    code = "non_finite"
    result: object = None


class CheckError(ExecutionError):
    """A check of the step's own, an `assert` or `raise` by values, did not hold; the step has changed nothing."""

    code = "check"


class DebugCallbackError(ShardwrightError):
    """A function that a step calls by `jax.debug.callback` raised; the step has run. `__cause__` is what it raised."""

    code = "debug_callback"


class CheckpointError(ShardwrightError):
    """A checkpoint cannot be written or read: the directory, a step number, or its contents."""

    code = "checkpoint"


class DatasetError(ShardwrightError):
    """A dataset that workers read: its module is not allowed, its function raises, or what it yields is no batch."""

    code = "dataset"


class SnapshotLostError(ShardwrightError):
    """After a loss of workers, the state cannot be restored from a snapshot, or the steps since not be run again."""

    code = "snapshot_lost"


class StateStoreError(ShardwrightError):
    """The server's state directory cannot be read or written; names the file."""

    code = "state_store"


class LaunchError(ShardwrightError):
    """Processes of a job cannot be started, or one of them failed; names the host or the rank."""

    code = "launch"


class CollectiveError(ShardwrightError, RuntimeError):
    """A collective that ranks call differently, that a type is not defined for, or that is called outside a job.

    It is a RuntimeError as well, which programs for PyTorch and Horovod catch.
    """

    code = "collective"


class ObjectTypeError(CollectiveError, TypeError):
    """An object that cannot be sent without running code at the receiver; names its path in what was sent."""

    code = "object_type"


class RankLostError(CollectiveError):
    """A collective broke off: a rank died or left, or the network between ranks failed."""

    code = "rank_lost"


class InternalError(ShardwrightError):
    """A defect of Shardwright; the message holds the material of a bug report."""

    code = "internal"


class ShardwrightWarning(UserWarning):
    """Base class of Shardwright's warnings."""


class LargeFetchWarning(ShardwrightWarning):
    """An operator, or a function of JAX, reads a large array from the servers; names the caller."""


class SettingWarning(ShardwrightWarning):
    """An active setting of JAX has no effect on programs on the servers."""


def _family(cls: type[ShardwrightError]) -> list[type[ShardwrightError]]:
    return [cls, *(member for child in cls.__subclasses__() for member in _family(child))]


ERRORS_BY_CODE: dict[str, type[ShardwrightError]] = {cls.code: cls for cls in _family(ShardwrightError)}
