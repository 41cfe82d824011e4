"""Steps under a mesh with Explicit axes, traced under Auto ones: what the user wrote is kept as pins, nothing else.

Under Explicit axes JAX derives a sharding for every value and writes all of them into the text. A planner wants what
was written: `out_sharding=` of any function, `reshard`, `jax.sharding.auto_axes` and `explicit_axes`. All of them go
through few functions of JAX (0.10.2 to 0.12.0), which are replaced for the thread that traces:

- `canonicalize_sharding` reads what was written; it is given back over the Explicit mesh, which marks it;
- `Primitive.bind` takes the mark off an equation and puts a `with_sharding_constraint` on its result, before any
  differentiation, so that the step is the one that its author would have written under Auto axes;
- the decorators `auto_axes` and `explicit_axes` move their arguments to a mesh of other types: only what their author
  named is a pin; nested `jax.jit` take the mesh from `get_ctx_mesh`;
- `shard_map` checks its mesh against the context's;
- arrays that the step closes over have types over the Explicit mesh: they get them over the Auto one.

`jax.typeof(x).sharding` may be passed on ("laid out like x": says nothing that a planner does not see), and its mesh is
the Auto one. Its `spec` is known of what the user pinned; who reads another one needs the types: `TypesRead`.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.extend.source_info_util import register_exclusion
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from shardwright.xla import private
from shardwright.xla.replaced_names import Place, ReplacedNames

register_exclusion(__file__)  # the pins' source lines are the user's

#: Parameters of equations in which `out_sharding=` ends.
_WRITTEN = ("out_sharding", "sharding", "dst_sharding")


_spec: Any = PartitionSpec  # JAX's has no types


class TypesRead(Exception):
    """The step reads the sharding in the type of one of its values.

    where: its source line.
    """

    def __init__(self, where: str) -> None:
        super().__init__(f"{where} reads the sharding in a value's type")
        self.where = where


@dataclass(slots=True)
class _Tracing:
    """One step on its way.

    explicit: the user's mesh. auto: the same one, with Auto axes. are_pins: of the `reshard`s that decorators still
    have to do, the next one last, whether they are pins. read_at: where a type was read; "": nowhere.
    region_meshes: cells with the meshes of `shard_map`s, and what stood in them. pinned: by id, values whose types the
    user wrote, and their specs.
    """

    explicit: AbstractMesh
    auto: AbstractMesh
    are_pins: list[bool] = field(default_factory=list)
    read_at: str = ""
    region_meshes: list[tuple[Any, Any]] = field(default_factory=list)
    pinned: dict[int, tuple[Any, PartitionSpec]] = field(default_factory=dict)

    def keep_spec(self, value: Any, spec: PartitionSpec) -> None:
        full = (*spec, *[None] * (value.ndim - len(spec)))  # as in types
        self.pinned[id(value)] = value, _spec(*full)


_tracing: ContextVar[_Tracing | None] = ContextVar("explicit_axes", default=None)


def has_explicit_axes(mesh: Any) -> bool:
    return AxisType.Explicit in mesh.axis_types


def with_auto_axes(mesh: Any) -> AbstractMesh:
    """The mesh, abstract, with Auto axes in place of Explicit ones."""
    abstract: Any = mesh.abstract_mesh
    names = zip(abstract.axis_names, abstract.axis_types, strict=True)
    return abstract.update_axis_types({name: AxisType.Auto for name, kind in names if kind is AxisType.Explicit})  # type: ignore[no-any-return]


@contextmanager
def trace_under_auto_axes(mesh: AbstractMesh) -> Iterator[None]:
    """Steps are traced under Auto axes in place of the Explicit ones of `mesh`, with what was written as pins.

    Raises TypesRead where the step reads types, also if it catches that itself.
    """
    tracing = _Tracing(mesh, with_auto_axes(mesh))
    token = _tracing.set(tracing)
    try:
        with _names.replaced(), jax.sharding.use_abstract_mesh(tracing.auto):
            yield
    finally:
        _tracing.reset(token)
        for cell, mesh in reversed(tracing.region_meshes):
            cell.cell_contents = mesh
    if tracing.read_at:
        raise TypesRead(tracing.read_at)


# ---- pins ---------------------------------------------------------------------


def _is_written(sharding: Any) -> bool:
    return isinstance(sharding, NamedSharding) and has_explicit_axes(sharding.mesh)


def auto_sharding(sharding: NamedSharding) -> NamedSharding:
    """The sharding over Auto axes, in a `shard_map` over what it leaves of them. Auto axes that a mesh has besides may
    split what it does not."""
    mesh: Any = with_auto_axes(sharding.mesh)
    context: Any = jax.sharding.get_abstract_mesh()
    if AxisType.Manual in context.axis_types and context.axis_names == mesh.axis_names:
        mesh = context
    spec = sharding.spec
    if AxisType.Auto in sharding.mesh.axis_types:
        spec = _spec(*(PartitionSpec.UNCONSTRAINED if axes is None else axes for axes in spec))
    return NamedSharding(mesh, spec, memory_kind=sharding.memory_kind)


def _pin(value: Any, sharding: NamedSharding) -> Any:
    spec = sharding.spec
    if spec.unreduced or spec.reduced or len(spec) > value.ndim:  # sums that are not done: the planner's to decide
        return value
    pinned = jax.lax.with_sharding_constraint(value, auto_sharding(sharding))  # type: ignore[no-untyped-call]
    if (tracing := _tracing.get()) is not None:
        tracing.keep_spec(pinned, spec)
    return pinned


def keep_argument_types(arguments: Iterable[Any], types: Iterable[jax.ShapeDtypeStruct]) -> None:
    """Have a step that reads the types of its arguments get those that they were given."""
    tracing = _tracing.get()
    for argument, given in zip(arguments, types, strict=True):
        if tracing is not None and given.sharding is not None:
            tracing.keep_spec(argument, given.sharding.spec)


# ---- what is replaced -----------------------------------------------------------


def _replace_canonicalize(original: Callable[..., Any]) -> Callable[..., Any]:
    def canonicalize_sharding(sharding: Any, api_name: str, *arguments: Any, **options: Any) -> Any:
        tracing = _tracing.get()
        if tracing is not None:
            if isinstance(sharding, _AskedSharding):
                return NamedSharding(tracing.auto, _spec()) if api_name == "reshard" else None
            if isinstance(sharding, PartitionSpec):
                return NamedSharding(tracing.explicit, sharding)
            if _is_written(sharding):
                return NamedSharding(sharding.mesh.abstract_mesh, sharding.spec)
            if isinstance(sharding, NamedSharding) and sharding.mesh is tracing.auto and any(sharding.spec):
                return NamedSharding(
                    tracing.explicit, sharding.spec
                )  # over `get_abstract_mesh()`; JAX's own split nothing
        return original(sharding, api_name, *arguments, **options)

    return canonicalize_sharding


def _replace_bind(original: Callable[..., Any]) -> Callable[..., Any]:
    def bind(primitive: Any, *arguments: Any, **params: Any) -> Any:
        if _tracing.get() is None:
            return original(primitive, *arguments, **params)
        pins = [params[name] for name in _WRITTEN if _is_written(params.get(name))]
        if not pins or primitive.name == "sharding_constraint":
            result = original(primitive, *arguments, **{name: _over_auto_axes(value) for name, value in params.items()})
            if primitive.name != "device_put":
                return result
            places = zip(result, params["devices"], strict=True)
            return [_pin(value, place) if _is_written(place) else value for value, place in places]
        if primitive.name == "reshard":
            return _pin(arguments[0], pins[0])
        written = {name: None if _is_written(value) else value for name, value in params.items()}
        result = original(primitive, *arguments, **written)
        if primitive.multiple_results:  # the key's new state, and the numbers
            return [*result[:-1], _pin(result[-1], pins[0])]
        return _pin(result, pins[0])

    return bind


def _over_auto_axes(value: Any) -> Any:
    """A parameter of an equation: shardings in it, also of a nested `jax.jit`, over Auto axes."""
    if _is_written(value):
        return auto_sharding(value)
    if isinstance(value, tuple) and any(map(_is_written, value)):
        return tuple(map(_over_auto_axes, value))
    return value


def _replace_new_mesh(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_new_mesh(axes: Any, axis_type: Any, name: str, *arguments: Any, **options: Any) -> Any:
        tracing = _tracing.get()
        if tracing is None:
            return original(axes, axis_type, name, *arguments, **options)
        pins_results = name == "auto_axes"
        tracing.are_pins += [pins_results, not pins_results]
        return _UnchangedMesh(jax.sharding.get_abstract_mesh())

    return get_new_mesh


@dataclass(frozen=True, slots=True)
class _UnchangedMesh:
    """What `auto_axes` and `explicit_axes` ask of a mesh, where its types stay as they are."""

    new: AbstractMesh

    @property
    def prev(self) -> AbstractMesh:
        return self.new

    @property
    def axes(self) -> tuple[str, ...]:
        return ()  # none of the mesh's own, so that the decorators go their usual way


def _replace_reshard(original: Callable[..., Any]) -> Callable[..., Any]:
    def reshard(values: Any, shardings: Any) -> Any:
        tracing = _tracing.get()
        if tracing is None or not tracing.are_pins or _is_of_manual_axes(shardings) or tracing.are_pins.pop():
            return original(values, shardings)
        return values

    return reshard


def _is_of_manual_axes(shardings: Any) -> bool:
    """Whether `Primitive.bind` asks, for a value that a `shard_map` closes over, and no decorator."""
    return isinstance(shardings, NamedSharding) and AxisType.Manual in shardings.mesh.axis_types


def _replace_region_checks(original: Callable[..., Any]) -> Callable[..., Any]:
    """Of a `shard_map`'s mesh, which is kept for its next call: after the tracing that is the user's own again."""

    def shmap_checks(mesh: Any, *arguments: Any) -> Any:
        tracing = _tracing.get()
        if tracing is None:
            return original(mesh, *arguments)
        tracing.region_meshes.append((_cell_of(sys._getframe(1), "mesh"), mesh))
        is_explicit = mesh is not None and has_explicit_axes(mesh)
        return original(with_auto_axes(mesh) if is_explicit else mesh, *arguments)

    return shmap_checks


def _cell_of(frame: Any, name: str) -> Any:
    """The cell of a variable that the function which runs in `frame` shares with the one around it. JAX's wrapper of
    that function runs it, and holds it."""
    code = frame.f_code
    (function,) = (each for each in frame.f_back.f_locals.values() if getattr(each, "__code__", None) is code)
    return function.__closure__[code.co_freevars.index(name)]


def _replace_context_mesh(original: Callable[..., Any]) -> Callable[..., Any]:
    """With its devices where it has some: JAX lowers callbacks for devices only."""

    def get_ctx_mesh(*arguments: Any) -> Any:
        mesh = original(*arguments)
        if _tracing.get() is None:
            return mesh
        if isinstance(mesh, AbstractMesh) or mesh.empty:
            return jax.sharding.get_abstract_mesh()
        return jax.sharding.Mesh(mesh.devices, mesh.axis_names, axis_types=with_auto_axes(mesh).axis_types)

    return get_ctx_mesh


def _replace_taking(original: Callable[..., Any]) -> Callable[..., Any]:
    """Of `x.at[…].get`, which forgets what was written where a slice will do."""

    def rewriting_take(*arguments: Any, **options: Any) -> Any:
        written: Any = options.get("out_sharding")
        if _tracing.get() is None or not _is_written(written):
            return original(*arguments, **options)
        return _pin(original(*arguments, **options | {"out_sharding": None}), written)

    return rewriting_take


def _replace_check(original: Callable[..., Any]) -> Callable[..., Any]:
    def check_shardings_are_auto(sharding: Any) -> None:
        if _tracing.get() is None:
            original(sharding)

    return check_shardings_are_auto


def _replace_type(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Of the types of arrays with values."""

    def type_of(array: Any) -> Any:
        aval = original(array)
        if _tracing.get() is None or not has_explicit_axes(aval.sharding.mesh):
            return aval
        return aval.update(sharding=NamedSharding(with_auto_axes(aval.sharding.mesh), _spec()))

    return type_of


# ---- types that are asked for -----------------------------------------------------


class _AskedSharding(NamedSharding):
    """The sharding in a type that the user's code asked for, over the Auto mesh. known: its spec; None: the step would
    have to be traced under the Explicit mesh for it."""

    known: PartitionSpec | None = None

    @property
    def spec(self) -> Any:  # type: ignore[override]
        tracing, frame = _tracing.get(), sys._getframe(1)
        if self.known is None and tracing is not None and _is_users(frame):
            tracing.read_at = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            raise TypesRead(tracing.read_at)
        return self.known or _spec()


_TYPE_SLOTS: Any = {name: slot for name, slot in vars(jax.core.ShapedArray).items() if inspect.ismemberdescriptor(slot)}


class _AskedType(jax.core.ShapedArray):
    __slots__ = ("asked_sharding",)
    asked_sharding: _AskedSharding

    @property
    def sharding(self) -> Any:
        return self.asked_sharding


def _replace_typeof(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def typeof(value: Any) -> Any:
        aval, tracing, frame = original(value), _tracing.get(), sys._getframe(1)
        if tracing is None or type(aval) is not jax.core.ShapedArray:
            return aval
        if "sharding" not in frame.f_code.co_names or not _is_users(frame):
            return aval
        asked: Any = object.__new__(_AskedType)
        for slot in _TYPE_SLOTS.values():
            slot.__set__(asked, slot.__get__(aval))
        sharding: Any = _AskedSharding(aval.sharding.mesh, _spec())
        _, sharding.known = tracing.pinned.get(id(value), (value, None))
        object.__setattr__(asked, "asked_sharding", sharding)
        return asked

    return typeof


def _is_users(frame: Any) -> bool:
    return frame.f_globals.get("__name__", "").partition(".")[0] not in ("jax", "shardwright")


#: JAX's private names of this module.
PRIVATE_NAMES = {
    "jax._src.sharding_impls": ("canonicalize_sharding",),
    "jax._src.core": ("Primitive.bind", "pytype_aval_mappings"),
    "jax._src.pjit": ("_get_new_mesh", "reshard", "get_ctx_mesh", "check_shardings_are_auto"),
    "jax._src.shard_map": ("_shmap_checks",),
    "jax._src.numpy.indexing": ("rewriting_take",),
    "jax._src.array": ("ArrayImpl",),
    "jax._src.random.prng": ("PRNGKeyArray",),
}


def _places() -> list[Place]:
    """Raises PlatformError where this JAX lacks a name."""
    private.check_platform(PRIVATE_NAMES)
    module = importlib.import_module
    core, pjit = module("jax._src.core"), module("jax._src.pjit")
    name = "canonicalize_sharding"
    canonicalize = getattr(module("jax._src.sharding_impls"), name)
    importing = [each for each in list(sys.modules.values()) if getattr(each, "__dict__", {}).get(name) is canonicalize]
    kinds = (module("jax._src.array").ArrayImpl, module("jax._src.random.prng").PRNGKeyArray)
    return [
        *((each, name, _replace_canonicalize) for each in importing),
        (core.Primitive, "bind", _replace_bind),
        (pjit, "_get_new_mesh", _replace_new_mesh),
        (pjit, "reshard", _replace_reshard),
        (pjit, "get_ctx_mesh", _replace_context_mesh),
        (pjit, "check_shardings_are_auto", _replace_check),
        (module("jax._src.shard_map"), "_shmap_checks", _replace_region_checks),
        (module("jax._src.numpy.indexing"), "rewriting_take", _replace_taking),
        *((core.pytype_aval_mappings, kind, _replace_type) for kind in kinds),
        (jax, "typeof", _replace_typeof),
    ]


_names = ReplacedNames(_places)
