"""A traced ATen graph, evaluated on arrays: under `jax.jit`, on those of the program."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax.extend.source_info_util import register_exclusion

from shardwright.client.frontends.torch.aliases import Storage, Tensor, inverse_of
from shardwright.client.frontends.torch.dtypes import numpy_type
from shardwright.client.frontends.torch.labels import Label
from shardwright.client.frontends.torch.lowerings import Call, find
from shardwright.client.frontends.torch.lowerings.registry import TABLE, Lowering
from shardwright.errors import InternalError, ShardwrightError, UnsupportedProgramError, add_place

register_exclusion(str(Path(__file__).parent))  # source lines in programs are the user's

#: Operators that update arguments besides the first, by their numbers; new values end the lowering's result.
RUNNING_STATISTICS = {
    "native_batch_norm": (3, 4),
    "_native_batch_norm_legit": (3, 4),
    "_batch_norm_with_update": (3, 4),
    "cudnn_batch_norm": (3, 4),
}

#: Operators that make their argument a view of itself: its contents stay, its shape changes.
_VIEWS_IN_PLACE = ("detach_", "squeeze_", "swapaxes_", "swapdims_", "t_", "transpose_", "unsqueeze_")

#: What Python computes with numbers that only the servers know.
_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    torch.sym_float: lambda x: jnp.asarray(x, jnp.float64),
    torch.sym_int: lambda x: jnp.trunc(jnp.asarray(x)).astype(jnp.int64),
    torch.sym_max: jnp.maximum,
    torch.sym_min: jnp.minimum,
    torch.sym_not: jnp.logical_not,
    torch.sym_ite: jnp.where,
}
for _name in ("sqrt", "exp", "log2", "cos", "sin", "tanh"):
    if hasattr(torch, f"_sym_{_name}"):
        _FUNCTIONS[getattr(torch, f"_sym_{_name}")] = getattr(jnp, _name)


def base_name(op: Any) -> str:
    """`aten::add_.Tensor` → `add_`."""
    return str(op.name()).partition("::")[2].partition(".")[0]


def lowering_of(op: Any) -> Lowering | None:
    """How an overload is computed; None: not at all."""
    name = base_name(op)
    if name.startswith("_foreach_"):
        return _foreach(op)
    lowering = find(op)
    if lowering is None and name.endswith("_") and not name.startswith("__"):
        plain = str(op.name()).partition("::")[2]
        overload = plain.partition(".")[2]
        lowering = TABLE.get(f"{name[:-1]}.{overload}") or TABLE.get(name[:-1])
    return lowering


def is_view(op: Any) -> bool:
    """Whether the result shares the first argument's memory."""
    returns = op._schema.returns
    alias = returns[0].alias_info if returns else None
    return alias is not None and not alias.is_write


def list_written_arguments(op: Any, args: Sequence[Any]) -> list[int]:
    """Numbers of the arguments that an operator updates in place."""
    name = base_name(op)
    if name in RUNNING_STATISTICS:
        is_training = "with_update" in name or bool(args[5])
        return [
            n for n in RUNNING_STATISTICS[name] if is_training and args[n] is not None and "no_stats" not in str(op)
        ]
    return [
        n
        for n, argument in enumerate(op._schema.arguments)
        if n < len(args) and argument.alias_info is not None and argument.alias_info.is_write
    ]


def list_written_outputs(op: Any) -> tuple[str, ...]:
    """Names of the arguments that are there to be written to, such as `out`."""
    return tuple(argument.name for argument in op._schema.arguments if argument.is_out)


def list_written_nodes(node: Any) -> list[Any]:
    """Nodes of the tensors that a node's operator updates in place: arguments, lists of them, or `out=`."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    values = [node.args[number] for number in list_written_arguments(node.target, node.args)]
    values += [node.kwargs[name] for name in list_written_outputs(node.target) if name in node.kwargs]
    return [element for value in values for element in (value if isinstance(value, list | tuple) else [value])]


def source_node(node: Any) -> Any:
    """The node of the tensor whose memory a node's result is; None: it has memory of its own.

    Of a view it is the base, of an update in place what is updated.
    """
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    if is_view(node.target) or list_written_arguments(node.target, node.args) == [0]:
        return node.args[0]
    outputs = list_written_outputs(node.target)
    return node.kwargs.get(outputs[0]) if len(outputs) == 1 else None


def is_check(node: Any) -> bool:
    """Whether a node asks for a condition without which the step is an error."""
    return isinstance(node.target, torch._ops.OpOverload) and base_name(node.target) == "_assert_async"


def is_side_effect(target: Any) -> bool:
    """Whether a node computes nothing: profiling, assertions."""
    name = target.name() if isinstance(target, torch._ops.OpOverload) else str(getattr(target, "__name__", target))
    return name.startswith("profiler::") or "_assert" in name or "sym_constrain" in name


class Evaluation:
    """One evaluation of a graph.

    constants: arrays of the tensors that the graph refers to by name. key: random draws are made from it. checks: the
    conditions that the graph asks for.
    """

    def __init__(self, graph: Any, constants: Mapping[str, Any], key: jax.Array | None) -> None:
        self._graph = graph
        self._constants = constants
        self._key = key
        self._values: dict[Any, Any] = {}
        self.checks: list[jax.Array] = []

    def run(self, inputs: Sequence[Any]) -> Any:
        """The graph's outputs, as it nests them."""
        passed = iter(inputs)
        label, scope = None, ExitStack()
        with ExitStack() as last:
            last.callback(lambda: scope.close())  # noqa: PLW0108  # of the scope then
            for node in self._graph.nodes:
                if node.op == "placeholder":
                    self._values[node] = _wrap(next(passed))
                elif node.op == "get_attr":
                    self._values[node] = _wrap(jnp.asarray(self._constants[node.target]))
                elif node.op == "output":
                    return self._read(node.args[0])
                elif is_check(node):
                    self.checks.append(jnp.all(self._read(node.args[0]) != 0))
                elif not is_side_effect(node.target):
                    here = node.meta.get("label", Label())
                    if here != label:
                        scope.close()
                        label, scope = here, ExitStack()
                        scope.enter_context(jax.named_scope(here.scope) if here.scope else nullcontext())
                    self._values[node] = _call_from(here, functools.partial(self._evaluate, node))
        raise InternalError("a traced graph has no output")

    def _evaluate(self, node: Any) -> Any:
        target = node.target
        if not isinstance(target, torch._ops.OpOverload):
            args, kwargs = self._resolve(node.args), self._resolve(dict(node.kwargs))
            if target is operator.getitem:
                return args[0][args[1]]
            args = self._read(node.args)
            return _FUNCTIONS.get(target, target)(*args, **self._read(kwargs))
        try:
            return self._operator(node, target)
        except ShardwrightError as error:
            raise add_place(error, node.meta.get("label", Label()).place or str(target)) from None

    def _operator(self, node: Any, op: Any) -> Any:
        name = base_name(op)
        if name == "_local_scalar_dense":
            value = self._read(node.args[0]).reshape(())
            return value.astype(jnp.float64 if value.dtype.kind in "fV" else jnp.int64)
        lowering = lowering_of(op)
        if lowering is None:
            raise UnsupportedProgramError(f"there is no lowering of {op}")
        result = node.meta.get("val")
        types = tuple(arg.meta.get("val") if isinstance(arg, torch.fx.Node) else arg for arg in node.args)
        call = Call(node, result, types, functools.partial(self._draw, node))
        if is_view(op):
            return self._view(call, op, lowering)
        if name in _VIEWS_IN_PLACE:
            self._values[node.args[0]] = self._view(call, op, lowering)
            return self._values[node.args[0]]
        outputs = list_written_outputs(op)
        kwargs = {name: value for name, value in node.kwargs.items() if name not in outputs}
        value = lowering(call, *self._read(node.args), **self._read(kwargs))
        if outputs:
            return self._write_outputs(op, [node.kwargs[name] for name in outputs], value)
        written = list_written_arguments(op, node.args)
        if name in RUNNING_STATISTICS:
            return self._with_statistics(call, op, value, written)
        if written and name.startswith("_foreach_"):
            for tensor, new in zip(self._resolve(node.args[0]), value, strict=True):
                tensor.write(_fit(new, tensor.read().dtype, tensor.read().shape, op))
            return None
        if written:
            tensor = self._values[node.args[written[0]]]
            old = tensor.read()
            tensor.write(_fit(value, old.dtype, old.shape, op))
            return tensor
        return _wrap_results(value, result, op)

    def _write_outputs(self, op: Any, nodes: Sequence[Any], value: Any) -> Any:
        tensors = [self._values[node] for node in nodes]
        for tensor, new in zip(tensors, [value] if len(nodes) == 1 else value, strict=True):
            tensor.write(_fit(new, tensor.read().dtype, tensor.read().shape, op))
        return tensors[0] if len(nodes) == 1 else tensors

    def _view(self, call: Call, op: Any, lowering: Lowering) -> Any:
        node = call.node
        base = self._values[node.args[0]]
        args, kwargs = self._read(node.args[1:]), self._read(dict(node.kwargs))
        if isinstance(call.result, list | tuple):
            count = len(call.result)
            return [base.view(lambda x, n=n: lowering(call, x, *args, **kwargs)[n], None) for n in range(count)]
        inverse = inverse_of(base_name(op).removesuffix("_"), args) if not kwargs else None
        return base.view(lambda x: lowering(call, x, *args, **kwargs), inverse)

    def _with_statistics(self, call: Call, op: Any, value: Any, written: Sequence[int]) -> Any:
        for number, new in zip(RUNNING_STATISTICS[base_name(op)], value[-2:], strict=True):
            if number in written:
                tensor = self._values[call.node.args[number]]
                old = tensor.read()
                tensor.write(_fit(new, old.dtype, old.shape, op))
        return _wrap_results(value[: len(call.result)], call.result, op)

    def _draw(self, node: Any) -> jax.Array:
        if self._key is None:
            raise InternalError("a random operator without a key")
        return jax.random.fold_in(self._key, node.meta["draw"])

    def _resolve(self, tree: Any) -> Any:
        """Arguments with values in place of nodes."""
        return torch.fx.node.map_arg(tree, self._values.__getitem__)

    def _read(self, tree: Any) -> Any:
        """Arguments with arrays in place of nodes."""
        return torch.fx.node.map_arg(tree, lambda node: _unwrap(self._values[node]))


def _wrap(value: Any) -> Any:
    return Tensor(Storage(value))


def _unwrap(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.read()
    return [_unwrap(element) for element in value] if isinstance(value, list | tuple) else value


def _wrap_results(value: Any, result: Any, op: Any) -> Any:
    if isinstance(result, list | tuple):
        return [_wrap_results(element, kind, op) for element, kind in zip(value, result, strict=True)]
    if not isinstance(result, torch.Tensor):
        return value
    if value is None:
        return None
    return _wrap(_fit(value, numpy_type(result.dtype), tuple(result.shape), op))


def _fit(value: Any, dtype: Any, shape: Sequence[int], op: Any) -> Any:
    """The value in the dtype of PyTorch's result. Raises InternalError on another shape."""
    value = jnp.asarray(value)
    if value.shape != tuple(shape):
        if value.size == 1 or len(value.shape) < len(shape):
            value = jnp.broadcast_to(value, shape)
        else:
            raise InternalError(f"the lowering of {op} gave shape {list(value.shape)}, PyTorch {list(shape)}")
    if value.dtype == dtype:
        return value
    return value.real.astype(dtype) if value.dtype.kind == "c" and dtype.kind != "c" else value.astype(dtype)


def _foreach(op: Any) -> Lowering | None:
    """`_foreach_add_(xs, ys)` is `add(x, y)` of each; lists are walked together, anything else is passed to all."""
    packet = getattr(torch.ops.aten, base_name(op).removeprefix("_foreach_").rstrip("_"), None)
    single = TABLE.get(packet._qualified_op_name.partition("::")[2]) if packet is not None else None
    if packet is not None and packet._qualified_op_name == "aten::norm":
        single = TABLE["linalg_vector_norm"]
    if single is None:
        return None

    def lower_all(call: Call, *args: Any, **kwargs: Any) -> list[Any]:
        results = []
        for number in range(len(args[0])):
            one = [arg[number] if isinstance(arg, list | tuple) else arg for arg in args]
            kinds = tuple(_nth(kind, number) for kind in call.types)
            result = call.result[number] if call.result else kinds[0]
            results.append(single(Call(call.node, result, kinds, call.draw), *one, **kwargs))
        return results

    return lower_all


def _nth(kind: Any, number: int) -> Any:
    element = kind[number] if isinstance(kind, list | tuple) else kind
    return element.meta.get("val") if isinstance(element, torch.fx.Node) else element


def _call_from(label: Label, function: Callable[[], Any]) -> Any:
    """`function()`, called from a frame with the user's file, line and function."""
    if not label.file:
        return function()
    return _frame(label.file, label.line, label.function)(function)


@functools.lru_cache(maxsize=4096)
def _frame(file: str, line: int, function: str) -> Callable[[Callable[[], Any]], Any]:
    source = "\n" * (line - 1) + "lambda function: function()"
    call = eval(compile(source, file, "eval"), {})
    call.__code__ = call.__code__.replace(co_name=function or "<module>")
    return call  # type: ignore[no-any-return]
