"""What a mask selects, `x[mask]`, in a program whose sizes are fixed: all rows, and which of them count.

Rows that were not selected hold the first selected one, so that what is computed of them is as defined as that, and
no gradient goes to them. Functions that treat rows alone keep the selection; sums, means and losses count what was
selected. Anything else is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.nn import functional as F

from shardwright.client.frontends.torch.evaluation import list_written_nodes
from shardwright.client.frontends.torch.labels import user_line
from shardwright.errors import UnsupportedProgramError

#: Functions of each element alone, by name.
_OF_ELEMENTS = (
    "add sub mul div true_divide rsub pow rpow neg abs exp expm1 log log1p log2 sqrt rsqrt square reciprocal "
    "sigmoid tanh relu gelu silu softplus logsigmoid leaky_relu elu sin cos erf sign floor ceil round clamp "
    "clamp_min clamp_max clip where eq ne lt le gt ge logical_and logical_or logical_not bitwise_and bitwise_or "
    "maximum minimum isnan isinf isfinite float double half bfloat16 long int bool to type_as type detach clone "
    "contiguous xlogy dropout masked_fill nan_to_num atan2 lerp remainder fmod __add__ __radd__ __sub__ __rsub__ "
    "__mul__ __rmul__ __truediv__ __rtruediv__ __rdiv__ __div__ __pow__ __rpow__ __neg__ __invert__ __and__ "
    "__or__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__"
)

_ELEMENTWISE = frozenset(_OF_ELEMENTS.split())

#: Functions of each row alone whose other arguments have no rows, and the least rank at which the first dimension is
#: that of rows.
_OF_ROWS = {
    "linear": 2, "layer_norm": 2, "rms_norm": 2, "group_norm": 2, "embedding": 1, "one_hot": 1, "max_pool2d": 3,
    "conv1d": 3, "conv2d": 4, "conv3d": 5, "matmul": 2, "__matmul__": 2,
}  # fmt: skip

#: Functions of a row alone where `dim` is none of rows, with the place of `dim` among their arguments.
_ALONG = dict.fromkeys(
    (
        "softmax", "log_softmax", "sum", "mean", "amax", "amin", "argmax", "argmin", "logsumexp", "prod", "any", "all",
        "max", "min", "cumsum", "unsqueeze", "squeeze",
    ),
    1,
) | {"gather": 1, "normalize": 2, "cosine_similarity": 2, "norm": 2, "flatten": 1}  # fmt: skip

#: Losses that are means of what they are of each element.
_LOSSES = (
    F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy, F.binary_cross_entropy_with_logits,
    F.kl_div, F.soft_margin_loss, F.cross_entropy, F.nll_loss,
)  # fmt: skip

#: Functions that add rows to places.
_INTO_PLACES = ("index_add", "index_add_")

_KNOWN_HERE = ("dtype", "device", "ndim", "requires_grad", "is_cuda")


class Selection:
    """The rows that `mask` selects, of `values`."""

    def __init__(self, values: Any, mask: Any) -> None:
        self.values = values
        self.mask = mask

    @staticmethod
    def of(tensor: Any, mask: Any) -> Selection:
        """`tensor[mask]`."""
        flat, rows = tensor.reshape(mask.numel(), *tensor.shape[mask.dim() :]), mask.reshape(-1)
        first = flat.detach().index_select(0, rows.to(torch.int64).argmax().reshape(1))
        fill = torch.where(
            rows.any(), first, (torch.ones_like if flat.is_floating_point() else torch.zeros_like)(first)
        )
        return Selection(torch.where(_over(rows, flat), flat, fill), rows)

    @staticmethod
    def of_places(mask: Any) -> Selection:
        """`mask.nonzero()`."""
        mask = mask if mask.dtype is torch.bool else mask != 0
        grid = torch.meshgrid(*(torch.arange(size) for size in mask.shape), indexing="ij")
        return Selection.of(torch.stack(grid, -1), mask)

    def __iter__(self) -> Any:
        return _refuse("a loop over it")

    def numel(self) -> Any:
        """A number that the servers count."""
        return self.mask.sum() * (self.values[0].numel() if self.ndim > 1 else 1)

    def unbind(self, dim: int = 0) -> tuple[Selection, ...]:
        if not dim % self.ndim:
            _refuse("unbind() of its rows")
        return tuple(Selection(part, self.mask) for part in self.values.unbind(dim))

    def __getattr__(self, name: str) -> Any:
        if name in _KNOWN_HERE:
            return getattr(self.values, name)
        method = getattr(torch.Tensor, name, None)
        if name.startswith("__") or method is None:
            raise AttributeError(name)
        if not callable(method):
            _refuse(name)
        return lambda *args, **kwargs: _apply(method, (self, *args), kwargs)

    def __getitem__(self, index: Any) -> Selection:
        if isinstance(index, Selection) and index.dtype is torch.bool and _are_same(self.mask, index.mask):
            return Selection.of(self.values, self.mask & index.values)
        if isinstance(index, tuple) and index and (index[0] is Ellipsis or index[0] == slice(None)):
            is_whole = index[0] is not Ellipsis or self.ndim > sum(part is not None for part in index[1:])
            if is_whole and not any(isinstance(part, torch.Tensor | Selection | list) for part in index):
                return Selection(self.values[index], self.mask)
        return _refuse("indexing it")

    def __len__(self) -> int:
        return _refuse("len() of it")

    def __bool__(self) -> bool:
        return _refuse("a decision by it")

    def __matmul__(self, other: Any) -> Any:
        return _apply(torch.Tensor.__matmul__, (self, other), {})

    __hash__ = object.__hash__

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        return _apply(function, args, kwargs or {})


def refuse_selections(values: Iterable[Any]) -> None:
    """Raises UnsupportedProgramError where one of these is a selection, whose size no result has."""
    if any(isinstance(value, Selection) for value in values):
        _refuse("a result of the step")


def _operator(name: str) -> Any:
    def apply(self: Selection, *args: Any) -> Any:
        return _apply(getattr(torch.Tensor, name), (self, *args), {})

    return apply


for _name in _OF_ELEMENTS.split():
    if _name.startswith("__") and hasattr(torch.Tensor, _name):
        setattr(Selection, _name, _operator(_name))


def _apply(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = function.__name__
    if name == "__getitem__":
        return take_places(*args)
    if name == "__setitem__":
        return _write_places(*args) if not isinstance(args[0], Selection) and has_places(args[1]) else _assign(*args)
    if name in _INTO_PLACES:
        return _add_places(function, *args, **kwargs)
    selection = next((value for value in (*args, *kwargs.values()) if isinstance(value, Selection)), None)
    if selection is None:
        _refuse(f"{name}() of a list with it")
    if function in _LOSSES:
        return _loss(function, selection, args, kwargs)
    if name in _ELEMENTWISE:
        return _rows(function, selection, args, kwargs, has_rows=True)
    if name in _OF_ROWS and args and args[0] is selection and selection.ndim >= _OF_ROWS[name]:
        return _rows(function, selection, args, kwargs, has_rows=False)
    if name in _ALONG:
        dims = kwargs["dim"] if "dim" in kwargs else args[_ALONG[name]] if len(args) > _ALONG[name] else None
        dims = (dims,) if isinstance(dims, int) else dims
        rank = selection.ndim + (name == "unsqueeze")
        if dims and all(isinstance(dim, int) and dim % rank for dim in dims):
            return _rows(function, selection, args, kwargs, has_rows=True)
        rest = {key: value for key, value in kwargs.items() if key != "dim"}
        if args and args[0] is selection and len(args) <= 2 and not rest and dims in (None, (0,)):
            return _reduce(name, selection, (0,) if dims else tuple(range(selection.ndim)))
    return _refuse(f"{name}() of it")


def _rows(function: Any, selection: Selection, args: Any, kwargs: Any, *, has_rows: bool) -> Any:
    """A function of each row alone. has_rows: whether tensors beside the selection are spread over its rows."""

    def plain(value: Any) -> Any:
        if isinstance(value, Selection):
            if not _are_same(selection.mask, value.mask):
                _refuse("what another mask selects, beside it,")
            if value.ndim != selection.ndim:
                _refuse("a selection of another rank beside it")
            return value.values
        rank = value.dim() if has_rows and isinstance(value, torch.Tensor) else 0
        if rank > selection.ndim or (rank == selection.ndim and value.shape[0] != 1):
            _refuse("a tensor of rows of its own beside it")
        return value

    values = function(*map(plain, args), **{key: plain(value) for key, value in kwargs.items()})
    if isinstance(values, torch.Tensor):
        return Selection(values, selection.mask)
    return type(values)([Selection(value, selection.mask) for value in values])


def _reduce(name: str, selection: Selection, dims: tuple[int, ...]) -> Any:
    values, mask = selection.values, _over(selection.mask, selection.values)
    if name == "sum":
        return torch.where(mask, values, torch.zeros_like(values)).sum(dims)
    if name == "mean":
        size = values[0].numel() if len(dims) > 1 else 1
        return _reduce("sum", selection, dims) / (selection.mask.sum() * size).to(values.dtype)
    if name in ("any", "all") and values.dtype is torch.bool:
        return (values & mask).any(dims) if name == "any" else (values | ~mask).all(dims)
    if name in ("max", "min", "amax", "amin") and len(dims) == values.dim() and values.is_floating_point():
        result = (values.amax if "max" in name else values.amin)(dims)  # rows left out hold a selected one
        return torch.where(selection.mask.any(), result, torch.nan)  # of none, eager PyTorch raises
    return _refuse(f"{name}() over its rows")


def _loss(function: Any, selection: Selection, args: Any, kwargs: Any) -> Any:
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    named = bound.arguments
    if named.get("size_average") is not None or named.get("reduce") is not None:
        _refuse("a loss of it with size_average or reduce")
    reduction, named["reduction"] = named["reduction"], "none"
    if function in (F.cross_entropy, F.nll_loss):
        source, target = named["input"], named["target"]
        if not isinstance(source, Selection) or not isinstance(target, Selection) or source.ndim < 2:
            _refuse(f"{function.__name__}() of it and of what is not selected")
        if not _are_same(source.mask, target.mask):
            _refuse("what another mask selects, beside it,")
        if not target.values.is_floating_point():
            ignored = torch.full_like(target.values, named["ignore_index"])
            named["input"], named["reduction"] = source.values, reduction
            named["target"] = torch.where(_over(target.mask, target.values), target.values, ignored)
            value = function(**named)
            return Selection(value, selection.mask) if reduction == "none" else value
    rows = _rows(function, selection, (), dict(named), has_rows=True)
    if reduction == "none":
        return rows
    if reduction == "batchmean":
        return _reduce("sum", rows, tuple(range(rows.ndim))) / selection.mask.sum()
    return _reduce(reduction, rows, tuple(range(rows.ndim)))


def has_places(index: Any) -> bool:
    """Whether an index is that of selected places."""
    return any(isinstance(part, Selection) for part in (index if isinstance(index, tuple) else (index,)))


def take_places(tensor: Any, index: Any) -> Selection:
    """`tensor[places]`, `tensor[rows, columns]`: a row for each place."""
    parts = index if isinstance(index, tuple) else (index,)
    places = [part for part in parts if isinstance(part, Selection)]
    mask = _common_mask(places)
    rest = parts[len(places) :]
    are_first = all(part is place for part, place in zip(parts, places, strict=False))
    are_places = are_first and all(part.dtype is torch.int64 and part.ndim == 1 for part in places)
    if isinstance(tensor, Selection) or not are_places or any(isinstance(part, torch.Tensor) for part in rest):
        _refuse("such an index")
    return Selection(tensor[(*(part.values for part in places), *rest)], mask)


def _common_mask(places: Sequence[Selection]) -> Any:
    if not all(_are_same(places[0].mask, part.mask) for part in places):
        _refuse("places of another mask beside it")
    return places[0].mask


def _write_places(tensor: Any, index: Any, value: Any) -> None:
    """`tensor[places] = value`: what is not selected goes to a row that is cut off."""
    if not isinstance(index, Selection) or (isinstance(value, Selection) and not _are_same(index.mask, value.mask)):
        _refuse("an assignment to it")
    values = value.values if isinstance(value, Selection) else value
    if isinstance(values, torch.Tensor) and not isinstance(value, Selection) and values.dim() >= tensor.dim():
        _refuse("an assignment of rows of its own to it")
    longer = torch.cat([tensor, torch.zeros_like(tensor[:1])])
    longer[torch.where(index.mask, index.values, tensor.shape[0])] = values
    tensor.copy_(longer[:-1])


def _add_places(function: Any, tensor: Any, dim: int, index: Any, source: Any, **kwargs: Any) -> Any:
    """`tensor.index_add(0, places, rows)`: zeros of what is not selected."""
    if not isinstance(index, Selection) or not isinstance(source, Selection) or dim:
        _refuse(f"{function.__name__}() with it")
    mask = _common_mask([index, source])
    rows = torch.where(_over(mask, source.values), source.values, torch.zeros_like(source.values))
    return function(tensor, dim, index.values, rows, **kwargs)


def _assign(tensor: Any, index: Any, value: Any) -> None:
    """`tensor[mask] = selection`."""
    is_mask = isinstance(tensor, torch.Tensor) and isinstance(index, torch.Tensor) and index.dtype is torch.bool
    if not is_mask or not isinstance(value, Selection) or not _are_same(index.reshape(-1), value.mask):
        _refuse("an assignment of it elsewhere")
    new = value.values.reshape(tensor.shape).to(tensor.dtype)
    tensor.copy_(torch.where(_over(index, tensor), new, tensor))


def _over(mask: Any, values: Any) -> Any:
    """A mask of leading dimensions, for values of more."""
    return mask.reshape(*mask.shape, *[1] * (values.dim() - mask.dim()))


def _are_same(first: Any, second: Any) -> bool:
    """Whether two masks have the same values: computed alike from the same, which nothing wrote to in between."""
    if first is second:
        return True
    if first.shape != second.shape:
        return False
    tracer = get_proxy_mode().tracer
    nodes = [get_proxy_slot(mask, tracer).proxy.node for mask in (first, second)]
    if not _are_equal(*nodes):
        return False
    order = list(tracer.graph.nodes)
    start, end = sorted(order.index(node) for node in nodes)
    inputs = _ancestors(nodes[0])
    return not any(written in inputs for node in order[start:end] for written in list_written_nodes(node))


def _are_equal(first: Any, second: Any) -> bool:
    if isinstance(first, torch.fx.Node) and isinstance(second, torch.fx.Node):
        if first is second:
            return True
        is_computed = first.op == second.op == "call_function" and first.target is second.target
        is_drawn = is_computed and torch.Tag.nondeterministic_seeded in getattr(first.target, "tags", ())
        return is_computed and not is_drawn and _are_equal(first.args, second.args) and first.kwargs == second.kwargs
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return len(first) == len(second) and all(map(_are_equal, first, second))
    return bool(type(first) is type(second) and first == second)


def _ancestors(node: Any) -> set[Any]:
    nodes, todo = set(), [node]
    while todo:
        node = todo.pop()
        if node not in nodes:
            nodes.add(node)
            todo += node.all_input_nodes
    return nodes


def _refuse(what: str) -> NoReturn:
    raise UnsupportedProgramError(
        f"{what} depends on how much a mask selects, and a program's sizes are fixed",
        where=user_line(),
        remedy="reduce what was selected (sum, mean, a loss), take mask.sum() for its size, or keep all elements and "
        "weight them: torch.where(mask, x, 0)",
    )
