"""Lookups of each batch element in its own part of an array become batched gathers and scatters.

`x[jnp.arange(n), y]` lowers to a gather with a counting index column: element i of the batch looks into row i of x.
Such indices hide from a batch split that each part needs only its own rows. With the counted dimension as a batching
dimension (`operand_batching_dims`, the lowering of `jnp.take_along_axis`) the sharding rules see it. The same holds for
scatters, the gradients of such gathers.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.hlo import ArrayShape, Instruction, Module
from shardwright.planner.rewrites import edit
from shardwright.planner.rules.linear import is_zero


@dataclass(frozen=True, slots=True, kw_only=True)
class _Names:
    """Attribute names of gathers and scatters for: dimensions with one element per index, batching dimensions of array
    and indices, and the dimensions the index columns count over.
    """

    picked: str
    batching: str
    indices_batching: str
    columns: str


_NAMES = {
    "gather": _Names(
        picked="collapsed_slice_dims",
        batching="operand_batching_dims",
        indices_batching="start_indices_batching_dims",
        columns="start_index_map",
    ),
    "scatter": _Names(
        picked="inserted_window_dims",
        batching="input_batching_dims",
        indices_batching="scatter_indices_batching_dims",
        columns="scatter_dims_to_operand_dims",
    ),
}


def batch_lookups(module: Module) -> Module:
    """`module` with counting index columns as batching dimensions; `module` itself without any."""
    counts = _Counts(module)
    dim_columns = {
        instruction: column
        for instruction in module.instructions()
        if instruction.opcode in _NAMES and (column := counts.column(instruction)) is not None
    }
    if not dim_columns:
        return module
    names = edit.Names(module)
    return edit.insert_ahead_of(module, dim_columns, lambda old, copy: _make_batching(copy, *dim_columns[old], names))


class _Counts:
    """Finds values that count, also loop-invariant ones."""

    def __init__(self, module: Module) -> None:
        self._loops = {
            parameter: instruction
            for instruction in module.instructions()
            if instruction.opcode == "while"
            for parameter in instruction.called["body"][0].parameters
        }

    def column(self, instruction: Instruction) -> tuple[int, int] | None:
        """(column, dimension of the indices along which it counts) of a possible batching dimension."""
        names, indices = _NAMES[instruction.opcode], self._source(_indices_of(instruction))
        vector_dim = instruction.get("index_vector_dim")
        if indices.opcode != "concatenate" or indices.get("dimensions") != (vector_dim,):
            return None
        if len(indices.operands) < 2 or any(_dims(part)[vector_dim] != 1 for part in indices.operands):
            return None
        for column, (part, dim) in enumerate(zip(indices.operands, instruction.get(names.columns), strict=True)):
            along = self._along(part)
            is_own = along is not None and _dims(part)[along] == _dims(instruction.operands[0])[dim]
            if along is None or not is_own or dim not in instruction.get(names.picked):
                continue
            if along != vector_dim and along not in instruction.get(names.indices_batching, ()):
                return column, along
        return None

    def _source(self, value: Instruction) -> Instruction:
        """The initial value of a loop-invariant value."""
        while value.opcode == "get-tuple-element" and value.operands[0] in self._loops:
            loop = self._loops[value.operands[0]]
            start, root = loop.operands[0], loop.called["body"][0].root
            if start.opcode != "tuple" or root.opcode != "tuple" or root.operands[value.index] is not value:
                break
            value = start.operands[value.index]
        return value

    def _along(self, value: Instruction) -> int | None:
        """The dimension along which the elements of `value` are 0, 1, 2, …, equal along all others."""
        value = self._source(value)
        opcode = value.opcode
        if opcode == "iota":
            return int(value.get("iota_dimension"))
        if opcode == "select":
            return self._along(value.operands[2]) if _is_wrapped(value) else None
        if opcode not in ("convert", "copy", "broadcast", "reshape"):
            return None
        source = self._along(value.operands[0])
        if source is None or opcode in ("convert", "copy"):
            return source
        before, now = _dims(value.operands[0]), _dims(value)
        if opcode == "reshape":
            return _dim_after_reshape(before, now, source)
        target = int(value.get("dimensions", ())[source])
        return target if now[target] == before[source] else None


def _indices_of(instruction: Instruction) -> Instruction:
    return instruction.operands[len(instruction.operands) // 2]


def _dims(value: Instruction) -> tuple[int, ...]:
    return value.shape.leaves[0].dimensions


def _is_wrapped(value: Instruction) -> bool:
    """`i < 0 ? i + n : i`, JAX's count from the end: i itself for a count."""
    test, _, otherwise = value.operands
    is_below = test.opcode == "compare" and test.get("direction") == "LT"
    return is_below and test.operands[0] is otherwise and is_zero(test.operands[1])


def _dim_after_reshape(source: tuple[int, ...], target: tuple[int, ...], dim: int) -> int | None:
    """The position of a dimension after a reshape that only adds or drops dimensions of one element."""
    source_dims = [d for d, size in enumerate(source) if size != 1]
    target_dims = [d for d, size in enumerate(target) if size != 1]
    if [source[d] for d in source_dims] != [target[d] for d in target_dims] or dim not in source_dims:
        return None
    return target_dims[source_dims.index(dim)]


def _make_batching(instruction: Instruction, column: int, along: int, names: edit.Names) -> list[Instruction]:
    """Turn the column's dimension of a gather or scatter into a batching one; returns the new inputs."""
    words, indices = _NAMES[instruction.opcode], _indices_of(instruction)
    dim = instruction.get(words.columns)[column]
    pairs = [*zip(instruction.get(words.batching, ()), instruction.get(words.indices_batching, ()), strict=True)]
    pairs = sorted([*pairs, (dim, along)])
    lists = {
        words.picked: [d for d in instruction.get(words.picked) if d != dim],
        words.columns: [d for d in instruction.get(words.columns) if d != dim],
        words.batching: [d for d, _ in pairs],
        words.indices_batching: [d for _, d in pairs],
    }
    instruction.attributes |= {name: edit.int_list(name, values) for name, values in lists.items()}
    vector_dim, count = instruction.get("index_vector_dim"), _dims(indices)[instruction.get("index_vector_dim")]
    parts = [
        _columns(indices, vector_dim, start, limit, names)
        for start, limit in ((0, column), (column + 1, count))
        if start < limit
    ]
    rest = parts[0] if len(parts) == 1 else _concatenate(parts, vector_dim, names)
    instruction.operands = tuple(rest if operand is indices else operand for operand in instruction.operands)
    return parts if rest is parts[0] else [*parts, rest]


def _columns(indices: Instruction, vector_dim: int, start: int, limit: int, names: edit.Names) -> Instruction:
    ranges = [(0, size, 1) for size in _dims(indices)]
    ranges[vector_dim] = (start, limit, 1)
    shape = ArrayShape(indices.shape.leaves[0].element_type, tuple(end - first for first, end, _ in ranges))
    name = names.like(indices.name, "columns")
    return edit.check_consistency(Instruction(name, "slice", shape, (indices,), {"slice": edit.slice_ranges(ranges)}))


def _concatenate(parts: list[Instruction], vector_dim: int, names: edit.Names) -> Instruction:
    sizes = list(_dims(parts[0]))
    sizes[vector_dim] = sum(_dims(part)[vector_dim] for part in parts)
    shape = ArrayShape(parts[0].shape.leaves[0].element_type, tuple(sizes))
    attributes = {"dimensions": edit.int_list("dimensions", [vector_dim])}
    name = names.like(parts[0].name, "joined")
    return edit.check_consistency(Instruction(name, "concatenate", shape, tuple(parts), attributes))
