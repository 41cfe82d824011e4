"""The user's source text: the expression that an instruction comes from, and what is to be written into it.

An instruction knows where its expression begins, not where it ends, and several may begin there: `x @ w + b` and
`x @ w`. Which one is meant follows from what it computes.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from shardwright.input_files import read_input

#: Functions and methods that take `out_sharding`, by the opcode of what they make.
_TAKERS = {
    "dot": frozenset(["einsum", "matmul", "dot", "tensordot", "dot_general"]),
    "gather": frozenset(["get"]),
    "reshape": frozenset(["reshape", "ravel"]),
    "broadcast": frozenset(["arange", "broadcast_in_dim", "broadcast_to", "empty", "full", "full_like", "ones"])
    | frozenset(["ones_like", "zeros", "zeros_like"]),
    "convolution": frozenset(["conv_general_dilated"]),
    "iota": frozenset(["arange", "broadcasted_iota"]),
}

_OPERATORS: dict[str, type[ast.operator]] = {
    "add": ast.Add,
    "divide": ast.Div,
    "dot": ast.MatMult,
    "multiply": ast.Mult,
    "power": ast.Pow,
    "subtract": ast.Sub,
}

#: Line (from 1) and column (in bytes, from 0).
Position = tuple[int, int]


@dataclass(frozen=True, slots=True, order=True)
class Insertion:
    """Text to put into a source at a position, in place of `cut` bytes; of several at one position, by rank.

    rank: (0, size) of what closes an expression of that size, 1 of what stands between two, (2, -size) of what opens
    one: the outer ahead of the inner, and back; a reshard is outside of the call whose result it takes.
    """

    at: Position
    rank: tuple[int, int, int]
    text: str
    cut: int = 0


@dataclass(frozen=True, slots=True)
class Expression:
    """An expression of a user's file."""

    node: ast.expr
    source: SourceText

    @property
    def call(self) -> str:
        """What it calls, in a word: `einsum`, `matmul` of `x @ w`, `at[].get` of `x[i]`, or an operator."""
        node = self.node
        if isinstance(node, ast.Call):
            name = _called(node)
            return "at[].get" if name == "get" else name
        if isinstance(node, ast.Subscript):
            return "at[].get"
        if isinstance(node, ast.BinOp):
            return "matmul" if isinstance(node.op, ast.MatMult) else type(node.op).__name__.lower()
        return ast.unparse(node)

    @property
    def text(self) -> str:
        return ast.get_source_segment(self.source.text, self.node) or ""

    @property
    def span(self) -> tuple[Position, Position]:
        node = self.node
        return (node.lineno, node.col_offset), (node.end_lineno or node.lineno, node.end_col_offset or 0)

    def takes_out_sharding(self, opcode: str) -> bool:
        """Whether JAX has a place for it here, or in the call that says the same."""
        if isinstance(self.node, ast.Call):
            return _called(self.node) in _TAKERS.get(opcode, ())
        if isinstance(self.node, ast.BinOp):
            return opcode == "dot" and isinstance(self.node.op, ast.MatMult)
        return opcode == "gather" and isinstance(self.node, ast.Subscript)

    def arguments(self) -> Sequence[Expression]:
        """Its operands, where they are arrays: both sides of an operator, arguments of a call without the equation."""
        node = self.node
        if isinstance(node, ast.BinOp):
            nodes = [node.left, node.right]
        elif isinstance(node, ast.Subscript):
            nodes = [node.value]
        elif isinstance(node, ast.Call):
            nodes = [each for each in node.args if not isinstance(each, ast.Starred | ast.Constant)]
            if isinstance(node.func, ast.Attribute) and not self.source.is_module(node.func.value):
                nodes.insert(0, node.func.value)
        else:
            return ()
        return [Expression(each, self.source) for each in nodes]

    def with_out_sharding(self, spec: str) -> Iterator[Insertion]:
        """What makes it the same call with `out_sharding=spec`."""
        node, (start, end) = self.node, self.span
        last = (end[0], end[1] - 1)
        size = self.source.offset(end) - self.source.offset(start)
        if isinstance(node, ast.BinOp):
            yield Insertion(start, (2, -size, 1), f"{self.source.numpy}.matmul(")
            yield Insertion(self.source.find(b"@", _end(node.left)), (1, 0, 0), ",", 1)
            yield Insertion(end, (0, size, 0), f", out_sharding={spec})")
        elif isinstance(node, ast.Subscript):
            yield Insertion(self.source.find(b"[", _end(node.value)), (1, 0, 0), ".at")
            yield Insertion(end, (0, size, 0), f".get(out_sharding={spec})")
        elif written := self._out_sharding():
            (first, stop) = written.span
            yield Insertion(first, (1, 0, 0), spec, self.source.offset(stop) - self.source.offset(first))
        else:
            has_arguments = isinstance(node, ast.Call) and (node.args or node.keywords)
            comma = "" if not has_arguments or self.source.ends_with_comma(last) else ", "
            yield Insertion(last, (0, size, 0), f"{comma}out_sharding={spec}")

    def _out_sharding(self) -> Expression | None:
        """What the call has as `out_sharding` already."""
        keywords = self.node.keywords if isinstance(self.node, ast.Call) else ()
        values = [Expression(each.value, self.source) for each in keywords if each.arg == "out_sharding"]
        return values[0] if values else None

    def resharded(self, spec: str) -> Iterator[Insertion]:
        """What puts it into `jax.sharding.reshard(…, spec)`."""
        start, end = self.span
        size = self.source.offset(end) - self.source.offset(start)
        yield Insertion(start, (2, -size, 0), "jax.sharding.reshard(")
        yield Insertion(end, (0, size, 1), f", {spec})")


class SourceText:
    """A file of the user's, parsed."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._lines = text.encode().splitlines(keepends=True)
        self._starts: dict[Position, list[ast.expr]] = {}
        tree = ast.parse(text)
        for node in ast.walk(tree):
            if isinstance(node, ast.expr):
                self._starts.setdefault((node.lineno, node.col_offset), []).append(node)
        imports = [each for each in ast.walk(tree) if isinstance(each, ast.Import | ast.ImportFrom)]
        self._imported = {(n.asname or n.name).split(".")[0] for each in imports for n in each.names}
        self.numpy = _numpy_name(tree)

    def expressions(self, at: Position, opcode: str) -> list[Expression]:
        """Those that begin at a position and may have made an instruction of this opcode, innermost first."""
        nodes = [Expression(node, self) for node in reversed(self._starts.get(at, ()))]
        takers = [each for each in nodes if each.takes_out_sharding(opcode)]
        if opcode == "gather":  # of `w["table"][ids]` the last, of `w["table"].at[ids].get()` the call
            takers = [each for each in takers if isinstance(each.node, ast.Call)] or takers[::-1]
        kind = _OPERATORS.get(opcode)
        alike = [each for each in nodes if kind and isinstance(each.node, ast.BinOp) and isinstance(each.node.op, kind)]
        calls = [each for each in nodes if isinstance(each.node, ast.Call)]
        return takers or alike or calls or [each for each in nodes if isinstance(each.node, ast.BinOp | ast.UnaryOp)]

    def is_module(self, node: ast.expr) -> bool:
        """Whether an expression is an imported name, or an attribute of one."""
        while isinstance(node, ast.Attribute):
            node = node.value
        return isinstance(node, ast.Name) and node.id in self._imported

    def offset(self, at: Position) -> int:
        return sum(map(len, self._lines[: at[0] - 1])) + at[1]

    def find(self, mark: bytes, start: Position) -> Position:
        """The first place of a mark from a position on."""
        line, column = start
        while (place := self._lines[line - 1].find(mark, column)) < 0:
            line, column = line + 1, 0
        return line, place

    def ends_with_comma(self, before: Position) -> bool:
        return self.text.encode()[: self.offset(before)].rstrip().endswith(b",")

    def insert(self, insertions: Sequence[Insertion], span: tuple[Position, Position] | None = None) -> str:
        """The text with these written in; span: of that part alone."""
        source = self.text.encode()
        start, end = (0, len(source)) if span is None else map(self.offset, span)
        pieces = []
        for insertion in sorted(set(insertions)):
            at = self.offset(insertion.at)
            pieces += [source[start:at], insertion.text.encode()]
            start = at + insertion.cut
        return b"".join([*pieces, source[start:end]]).decode()


@lru_cache(maxsize=32)
def read_source(file: str) -> SourceText | None:
    """A user's file; None where it is not here, or is no Python."""
    try:
        return SourceText(read_input(file).decode())
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return None


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else ast.unparse(node.func)


def _end(node: ast.expr) -> Position:
    return node.end_lineno or node.lineno, node.end_col_offset or 0


def _numpy_name(tree: ast.Module) -> str:
    """What the file calls `jax.numpy`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                if name.name == "jax.numpy":
                    return name.asname or name.name
        if isinstance(node, ast.ImportFrom) and node.module == "jax":
            for name in node.names:
                if name.name == "numpy":
                    return name.asname or name.name
    return "jax.numpy"
