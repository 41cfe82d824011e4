"""What `plan.out_shardings()` answers: lines to write, and what no line says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from shardwright.errors import PlanError
from shardwright.explicit.expressions import Insertion, read_source

if TYPE_CHECKING:
    from jax.sharding import PartitionSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class OutSharding:
    """What is to be written into one expression.

    file, line, column: where it begins; lines from 1, columns in bytes from 0. "" and 0: the text does not say.
    call: its name: `einsum`, `matmul` (of `x @ w` too), `at[].get` (of `x[i]` too), `reshape`, `zeros`, ….
    form: `out_sharding`, a keyword of the call, or `reshard`: put into `jax.sharding.reshard`.
    operand: what of it is resharded; "": its result.
    spec: the sharding.
    code: the expression with this and all else that is to be written into it; "" where the file is not here.
    note: a sentence where this is not all of the truth.
    """

    file: str
    line: int
    column: int
    call: str
    form: str
    operand: str
    spec: PartitionSpec
    code: str
    note: str = ""
    insertions: tuple[Insertion, ...] = field(default=(), repr=False)

    def __str__(self) -> str:
        what = f"{self.operand} of {self.call}" if self.operand else self.call
        written = (
            f"out_sharding={spec_text(self.spec)}"
            if self.form == "out_sharding"
            else f"jax.sharding.reshard(…, {spec_text(self.spec)})"
        )
        return f"line {self.line}, {what}: {written}" + (f" ({self.note})" if self.note else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class OutShardings:
    """A plan in the words of JAX's Explicit mode.

    mesh_sizes, mesh_names: of the mesh to make, `jax.make_mesh(sizes, names)`.
    arguments, results: `PartitionSpec`s, as `plan.partition_specs()` gives them.
    entries: what is to be written, by file, line and column. Where JAX's own rules give what the plan has, nothing is.
    backward: what the plan does in the backward pass and no line of the forward pass says, in words.
    notes: what is said otherwise than planned.
    """

    mesh_sizes: tuple[int, ...]
    mesh_names: tuple[str, ...]
    arguments: Any
    results: Any
    entries: tuple[OutSharding, ...]
    backward: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    names: tuple[tuple[str, PartitionSpec], ...] = ()

    def written_into(self, file: str) -> str:
        """The text of a file of the user's with all of its entries written in.

        Raises PlanError where the file is not here.
        """
        source = read_source(file)
        if source is None:
            raise PlanError(f"{file} cannot be read as Python", remedy="ask where the step's source lies")
        return source.insert([each for entry in self.entries if entry.file == file for each in entry.insertions])

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield "from jax.sharding import PartitionSpec as P"
        yield f"mesh = jax.make_mesh({self.mesh_sizes}, {self.mesh_names})  # Explicit axes, JAX's default"
        yield ""
        yield "# arguments, placed by jax.device_put under jax.set_mesh(mesh)"
        by_spec: dict[str, list[str]] = {}
        for name, spec in self.names:
            by_spec.setdefault(spec_text(spec), []).append(name)
        for text, names in by_spec.items():
            yield f"#   {text}: {', '.join(names)}"
        if not self.entries:
            yield "# nothing else: JAX's own rules give the plan's shardings"
        for file, entries in groupby(self.entries, key=lambda entry: entry.file):
            yield ""
            yield f"# {PurePath(file).name or 'lines that the text does not name'}"
            codes: set[tuple[int, int, str]] = set()
            for entry in entries:
                yield f"# {entry}"
                code = (entry.line, entry.column, entry.code)
                if entry.code and code not in codes:
                    codes.add(code)
                    yield entry.code
        for title, sentences in (("backward pass, which no line says", self.backward), ("notes", self.notes)):
            if sentences:
                yield ""
                yield f"# {title}"
                yield from (f"#   {sentence}" for sentence in sentences)


def spec_text(spec: PartitionSpec) -> str:
    """`P('data', None)`."""
    return f"P({', '.join(map(repr, spec))})"
