"""A step of a module becomes one ATen graph: forward, backward and optimizer, traced by PyTorch over fake tensors.

No memory is taken for the tensors. The learning rates and other numbers of the call are symbols, and so are numbers
that the step reads out of tensors (an optimizer's count of steps): the graph computes with them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import sympy
import torch
from torch._decomp import decomposition_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.nn.attention import SDPBackend, sdpa_kernel

from shardwright.client.frontends.torch.checks import Check, list_checks, take_checks
from shardwright.client.frontends.torch.control_flow import write_out
from shardwright.client.frontends.torch.evaluation import (
    base_name,
    is_check,
    is_side_effect,
    is_view,
    list_written_nodes,
    lowering_of,
    source_node,
)
from shardwright.client.frontends.torch.forms import BoundedForms, compute_all_clusters
from shardwright.client.frontends.torch.functional import compute_with_symbols, infer_grouped_mm
from shardwright.client.frontends.torch.labels import Label, Labels
from shardwright.client.frontends.torch.packed import keep_padded
from shardwright.client.frontends.torch.refusals import explain_errors
from shardwright.client.frontends.torch.sparse import update_rows
from shardwright.errors import UnsupportedProgramError


@dataclass(frozen=True, slots=True)
class TensorType:
    """Shape and dtype of a tensor that the step takes."""

    shape: tuple[int, ...]
    dtype: Any


@dataclass(frozen=True, slots=True)
class Decisions:
    """What a step decided by the numbers of its call, as `if rate > 0:`, where all conditions came out true.

    symbols: one for each number, in order. conditions: SymPy's expressions of them.
    """

    symbols: tuple[Any, ...] = ()
    conditions: tuple[Any, ...] = ()

    def hold(self, numbers: Sequence[float]) -> bool:
        """Whether the step decides likewise for other numbers."""
        if not self.conditions:
            return True
        values = exact_values(self.symbols, numbers)
        return all(condition.xreplace(values) == sympy.true for condition in self.conditions)


def exact_values(symbols: Sequence[Any], numbers: Sequence[float]) -> dict[Any, Any]:
    """SymPy's form of some numbers, by their symbols."""
    return {
        symbol: sympy.Integer(number) if type(number) is int else sympy.Float(number)
        for symbol, number in zip(symbols, numbers, strict=True)
    }


@dataclass(frozen=True, slots=True)
class Graph:
    """A traced step.

    nodes: the torch.fx graph. constants: tensors that it refers to by name. outputs: output nodes, or values that are
    no tensors. changed: numbers of the leading outputs (each belongs to the input of its number) that the step
    updates. draws: number of random draws. decisions: what the step decided by its numbers. new_state: names of the
    outputs after the state that are state from now on. checks: the conditions that it asks for, in order.
    """

    nodes: Any
    constants: dict[str, Any]
    outputs: tuple[Any, ...]
    changed: frozenset[int]
    draws: int
    decisions: Decisions
    new_state: tuple[str, ...] = ()
    checks: tuple[Check, ...] = ()


def trace(
    function: Callable[[list[Any]], list[Any]],
    inputs: Sequence[TensorType | float],
    *,
    state_count: int,
    model: Any,
    optimizers: Sequence[Any],
    name: str,
    captured: Mapping[int, Any] | None = None,
) -> Graph:
    """The graph of `function`, from a flat list of inputs to a flat list of outputs.

    inputs: fake tensors of a type each; a number becomes a symbol with this value for decisions. The first
    `state_count` inputs and outputs are state, before and after. captured: tensors of this machine that the function
    reads by itself, by the number of the input that stands for each.

    Raises UnsupportedProgramError: the step depends on values, or on operators that have no lowering.
    """
    shapes = ShapeEnv(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=False)
    fake = FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True)
    labels = Labels()

    def run_with_labels(*values: Any) -> list[Any]:
        with labels.of(model, optimizers):
            return function(list(values))

    with fake:
        values = [
            torch.empty(value.shape, dtype=value.dtype, device="cpu") if isinstance(value, TensorType) else value
            for value in inputs
        ]
    values = [
        _symbol(shapes, value, number) if isinstance(value, int | float) else value
        for number, value in enumerate(values)
    ]
    symbols = [value.node.expr for value in values if isinstance(value, torch.SymFloat | torch.SymInt)]
    with _tracing(labels), explain_errors(name):
        graph = make_fx(
            run_with_labels, decomposition_table=_decompositions(), tracing_mode="fake", _allow_non_fake_inputs=True
        )(*values)
    _pass_captured(graph, captured or {})
    graph.graph.eliminate_dead_code(_is_impure)
    _require_lowerings(graph.graph, name)
    outputs = tuple(next(iter(reversed(graph.graph.nodes))).args[0])
    decisions = Decisions(tuple(symbols), tuple({guard.expr: None for guard in shapes.guards}))
    constants = {node.target: getattr(graph, node.target) for node in graph.graph.nodes if node.op == "get_attr"}
    return Graph(
        graph.graph, constants, outputs, _find_changed(graph.graph, outputs, state_count), labels.most_draws, decisions,
        checks=list_checks(graph.graph),
    )  # fmt: skip


def _pass_captured(graph: Any, captured: Mapping[int, Any]) -> None:
    """Inputs in place of the constants that stand for these tensors."""
    numbers = {id(tensor): number for number, tensor in captured.items()}
    places = [node for node in graph.graph.nodes if node.op == "placeholder"]
    for node in [node for node in graph.graph.nodes if node.op == "get_attr"]:
        number = numbers.get(id(getattr(graph, node.target)))
        if number is not None:
            node.replace_all_uses_with(places[number])
            graph.graph.erase_node(node)


def list_captured(graph: Graph) -> list[Any]:
    """Tensors of this machine that a traced function reads by itself; not those that it makes of numbers."""
    nodes = [node for node in graph.nodes.nodes if node.op == "get_attr"]
    captured = {node.target: None for node in nodes if any("lift_fresh" not in str(user.target) for user in node.users)}
    return [graph.constants[target] for target in captured]


def list_size_symbols(graph: Graph) -> set[Any]:
    """Symbols of numbers that decide about the sizes of tensors."""
    return {
        symbol
        for node in graph.nodes.nodes
        if isinstance(node.meta.get("val"), torch.Tensor)
        for size in node.meta["val"].shape
        if isinstance(size, torch.SymInt)
        for symbol in size.node.expr.free_symbols
    }


def _symbol(shapes: Any, value: float, number: int) -> Any:
    from torch._dynamo.source import ConstantSource

    source = ConstantSource(f"number{number}")
    symbol = shapes.create_symbol(
        value, source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None, positive=None,
        do_not_specialize_zero_one=True,
    )  # fmt: skip
    if isinstance(value, int):
        return shapes.create_symintnode(symbol, hint=value, source=source)
    return shapes.create_symfloatnode(symbol, hint=value, source=source)


def _decompositions() -> dict[Any, Any]:
    """PyTorch's own, of operators that have no lowering."""
    return {
        op: function
        for op, function in decomposition_table.items()
        if isinstance(op, torch._ops.OpOverload) and op.namespace == "aten" and lowering_of(op) is None
    }


@contextlib.contextmanager
def _tracing(labels: Labels) -> Iterator[None]:
    """Settings under which kernels of one device do not show in the graph.

    Attention is products and a softmax; recurrent layers are their cells. Autocast of any device is that of the CPU,
    where the fake tensors are. The state of the random generator, which activation checkpointing puts back, is the
    number of draws so far.
    """

    def get_state(*_: Any) -> Any:
        return _DrawCount(labels.draws)

    def set_state(state: Any) -> None:
        if isinstance(state, _DrawCount):
            labels.rewind(state.count)

    with contextlib.ExitStack() as settings:
        settings.enter_context(sdpa_kernel(SDPBackend.MATH))
        settings.callback(torch._C._set_mkldnn_enabled, torch._C._get_mkldnn_enabled())
        torch._C._set_mkldnn_enabled(False)
        for module in (torch, torch.random):
            settings.enter_context(mock.patch.object(module, "get_rng_state", get_state))
            settings.enter_context(mock.patch.object(module, "set_rng_state", set_state))
        settings.enter_context(
            mock.patch.object(torch._meta_registrations, "_meta_grouped_mm_common", infer_grouped_mm)
        )
        settings.enter_context(_autocast_on_cpu())
        settings.enter_context(mock.patch.object(torch.cuda, "synchronize"))
        from torch._dynamo import config as dynamo_settings

        settings.enter_context(dynamo_settings.patch(error_on_nested_fx_trace=False))  # of torch.compile
        settings.enter_context(BoundedForms())
        settings.enter_context(compute_all_clusters())
        settings.enter_context(update_rows())
        settings.enter_context(take_checks())
        settings.enter_context(write_out())
        settings.enter_context(keep_padded())
        settings.enter_context(compute_with_symbols())
        yield


class _DrawCount:
    """Stands for a state of the random generator."""

    def __init__(self, count: int) -> None:
        self.count = count


@contextlib.contextmanager
def _autocast_on_cpu() -> Iterator[None]:
    init = torch.amp.autocast_mode.autocast.__init__

    def on_cpu(self: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
        if dtype is None:
            dtype = torch.float16 if device_type == "cuda" else torch.bfloat16
        init(self, "cpu", dtype, *args, **kwargs)

    with mock.patch.object(torch.amp.autocast_mode.autocast, "__init__", on_cpu):
        yield


def _require_lowerings(graph: Any, name: str) -> None:
    """Raises UnsupportedProgramError with all operators that have no lowering, and where they stand."""
    missing: dict[str, dict[str, None]] = {}
    for node in graph.nodes:
        target = node.target
        if node.op != "call_function" or is_side_effect(target) or not isinstance(target, torch._ops.OpOverload):
            continue
        if base_name(target) == "_local_scalar_dense" or lowering_of(target) is not None:
            continue
        place = node.meta.get("label", Label()).place
        missing.setdefault(str(target), {})[place] = None
    if not missing:
        return
    lines = "".join(
        f"\n  {op}: {', '.join(place for place in places if place) or 'outside of the model'}"
        for op, places in sorted(missing.items())
    )
    remedy = "write these parts with other operators, or report the operators"
    if any("_sparse_coo_tensor" in op for op in missing):
        remedy = "make embeddings with sparse=False: servers keep dense gradients"
    raise UnsupportedProgramError(f"{name} uses operators that have no lowering:{lines}", remedy=remedy)


def _is_impure(node: Any) -> bool:
    if node.op in ("placeholder", "output") or is_check(node):
        return True
    return bool(list_written_nodes(node))


def _find_changed(graph: Any, outputs: Sequence[Any], state_count: int) -> frozenset[int]:
    """Numbers of the state that the graph updates: in place, or by another tensor in its stead."""
    places = [node for node in graph.nodes if node.op == "placeholder"][:state_count]
    written = {_root(tensor) for node in graph.nodes for tensor in list_written_nodes(node)}
    return frozenset(
        n
        for n, (place, output) in enumerate(zip(places, outputs[:state_count], strict=True))
        if place in written or _root(output) is not place
    )


def _root(node: Any) -> Any:
    """The node whose storage a node shows."""
    while node.op == "call_function":
        source = source_node(node)
        if source is None and getattr(node.target, "__name__", "") == "getitem" and is_view_list(node.args[0].target):
            source = node.args[0].args[0]
        if source is None:
            break
        node = source
    return node


def is_view_list(target: Any) -> bool:
    """Whether a node's target gives a list of views."""
    return isinstance(target, torch._ops.OpOverload) and is_view(target)
