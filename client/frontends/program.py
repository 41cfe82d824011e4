"""What every front end hands over: a program, and a function that becomes one.

A front end turns a framework's function and the types of a call into a `Program`. Everything after that, from planning
to checkpoints, knows programs only.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from shardwright.client.array_specs import ArraySpec, ArrayType
from shardwright.client.arrays import RemoteArray
from shardwright.client.debug_calls import NO_CALLS, Level
from shardwright.errors import ArrayError

_STACK_FRAME = re.compile(r" stack_frame_id=\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """HLO text of one step, and the mapping of its flat numbers to what a user passes and gets.

    hlo_text: its metadata holds the source labels of reports: scopes (`op_name`) and source lines.
    arguments / outputs: in the text's order, with the text's own types.
    aliases: output number → argument number that it updates in place. Such arguments are state; random state (a key or
        seed that the step advances) is one of them.
    donated: argument numbers; a call consumes their handles. All of `aliases`, and what is given away besides.
    constants: argument number → value, equal in all calls, sent once.
    captured: argument number → handle in the function's closure, passed with every call.
    specs: types of a call's leaves: all other arguments, in order.
    results: types of the outputs.
    result_tree: structure of a call's result.
    result_numbers: output number of each of its leaves.
    argument_tree: structure of (positional arguments, arguments by keyword) over the leaves of a call; None: they are
        flat.
    changed: leaf number of a call → output number of its new value, for arrays that the function changes in place.
    debug: what `jax.debug` says in the function; its arrays are the last outputs, and no caller sees them.
    """

    name: str
    hlo_text: str
    arguments: tuple[ArrayType, ...]
    outputs: tuple[ArrayType, ...]
    aliases: Mapping[int, int]
    donated: frozenset[int]
    specs: tuple[ArraySpec, ...]
    results: tuple[ArraySpec, ...]
    result_tree: Any
    result_numbers: tuple[int, ...]
    argument_tree: Any = None
    changed: Mapping[int, int] = field(default_factory=dict)
    constants: Mapping[int, np.ndarray] = field(default_factory=dict)
    captured: Mapping[int, RemoteArray] = field(default_factory=dict, compare=False)
    debug: Level = field(default=NO_CALLS, compare=False)

    @property
    def result_count(self) -> int:
        """Number of outputs that a caller sees, or that are put into arrays of the caller's."""
        return len(self.outputs) - len(self.debug.types)

    @property
    def leaf_numbers(self) -> tuple[int, ...]:
        """Argument number of each item of `with_captured(leaves)`: of all arguments but the constants."""
        return tuple(number for number in range(len(self.arguments)) if number not in self.constants)

    @property
    def leaf_specs(self) -> tuple[ArraySpec, ...]:
        """Types of `with_captured(leaves)`."""
        if not self.captured:
            return self.specs
        passed = iter(self.specs)
        return tuple(
            self.captured[number].spec if number in self.captured else next(passed) for number in self.leaf_numbers
        )

    def with_captured(self, leaves: Sequence[Any]) -> list[Any]:
        """The leaves of a call plus the captured handles, in the order of the program's arguments.

        Raises ArrayError on a handle deleted after tracing.
        """
        if not self.captured:
            return list(leaves)
        for handle in self.captured.values():
            if handle.is_deleted():
                raise ArrayError(
                    f"{self.name} closes over an array of shape {list(handle.shape)} that was {handle.why_deleted}",
                    remedy="pass it as an argument: a step keeps what it closed over when it was first called",
                )
        passed = iter(leaves)
        return [self.captured[number] if number in self.captured else next(passed) for number in self.leaf_numbers]

    def build_result(self, outputs: Sequence[Any]) -> Any:
        """A call's result, of the values of all outputs."""
        return jax.tree.unflatten(self.result_tree, [outputs[number] for number in self.result_numbers])

    def as_text(self) -> str:
        """The HLO text."""
        return self.hlo_text

    @property
    def identity(self) -> str:
        """Equal for programs with no difference but their source lines."""
        start, end = self.hlo_text.find("\nFileNames\n"), self.hlo_text.find("\nStackFrames\n")
        tables_end = self.hlo_text.find("\n\n", end + 1) if 0 <= start < end else -1
        text = self.hlo_text if tables_end < 0 else self.hlo_text[:start] + self.hlo_text[tables_end:]
        return hashlib.sha256(_STACK_FRAME.sub("", text).encode()).hexdigest()

    @property
    def argument_names(self) -> tuple[str, ...]:
        return tuple(argument.name for argument in self.arguments)

    @property
    def output_names(self) -> tuple[str, ...]:
        return tuple(output.name for output in self.outputs)


class FrontEnd(Protocol):
    """A function of some framework, as a step calls and lowers it."""

    @property
    def name(self) -> str:
        """Name of the function in messages."""

    def describe(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, takes_types: bool = False
    ) -> tuple[Hashable, list[Any], Any]:
        """(signature, leaves, arguments) of a call.

        Calls with equal signatures run the same program. leaves: the values of `Program.specs`. arguments: for the
        methods below. takes_types: types may stand for arrays; nothing will run.

        Raises a ShardwrightError on what is no argument.
        """

    def lower(self, signature: Any, *, platform: str) -> Program:
        """The program of a signature for `platform` ("cpu", "cuda", "tpu", …)."""

    def check_arguments(self, arguments: Any) -> None:
        """Raises UnsupportedProgramError on arguments that a program which changes them in place cannot take."""

    def write_back(self, arguments: Any, program: Program, results: Sequence[Any]) -> None:
        """Puts the new values of `program.changed` into `arguments`; results: handles of all outputs."""


@runtime_checkable
class ExportingFrontEnd(FrontEnd, Protocol):
    """One whose functions can leave the service."""

    def export(self, signature: Any, output_names: Sequence[str], *, platform: str) -> bytes:
        """The function of a signature in `jax.export`'s container: arguments by name → results by name."""
