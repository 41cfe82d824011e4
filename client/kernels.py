"""`shardwright.partition`: how a kernel of the user's own may be split.

A kernel (Pallas, Triton, …) is compiled for the sizes of its arrays: a device's part of it is another kernel. So
`partition` keeps the function that makes it, and while Shardwright lowers a step, traces and lowers it anew for every
part that a plan may ask for (`shardwright.kernels.forms`). Everywhere else the function itself runs.

The primitive survives `scan`, `jax.checkpoint` and `vmap`, whose dimension becomes a factor of the rule. It has no
derivative: the forward and the backward kernel of a `jax.custom_vjp` are wrapped each.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import SdyShardingRule, custom_partitioning
from jax.extend.core import Primitive
from jax.extend.source_info_util import current, register_exclusion, summarize
from jax.interpreters import ad, batching, mlir

from shardwright.client.annotate import is_lowering_for_us
from shardwright.client.frontends.jax.kernel_forms import lower_forms
from shardwright.client.frontends.jax.kernel_rules import KernelRule, bind_rule
from shardwright.errors import OptionError, UnsupportedProgramError
from shardwright.kernels import KERNEL_TARGET, NAME_ATTRIBUTE, RULE_ATTRIBUTE, encode_forms
from shardwright.xla import private

register_exclusion(__file__)  # source lines in programs and messages are the user's

#: Words of `custom_partitioning` for factors of a special kind; the short ones are Shardy's.
_KINDS = ("reduction_factors", "need_replication_factors", "permutation_factors")


def partition(kernel: Callable[..., Any], rule: str, *, parts: Sequence[int] = (), **words: Any) -> Callable[..., Any]:
    """`kernel`, to be split over devices as `rule` says.

        attention = shardwright.partition(
            kernel, "b h t d, b h s d, b h s d -> b h t d", need_replication=("t", "s", "d")
        )

    Args:
      kernel: a function of arrays that JAX can trace, of whole arrays and of parts alike: sizes are those of its
        arguments. What it needs besides is bound with `functools.partial`.
      rule: a name per dimension of each argument and result, in the words of `jax.experimental.custom_partitioning`:
        `…`, `(h g)` of two factors with `g=4`. A factor is split where it is the major one of its dimensions.
      need_replication: factors that stay whole (or `need_replication_factors`).
      reduction: factors of arguments alone, of which each part gives a term of the results; their sum is the result (or
        `reduction_factors`). Others that a result lacks are to be named in `need_replication`.
      permutation: further factors that stay whole (or `permutation_factors`).
      parts: into how many parts a factor may be cut; the parts of all factors together are no more than the largest
        number. Default: powers of two, to 128 parts by two factors, 16 by three.

    A part that the kernel cannot be lowered for, or whose blocks do not fill its arrays though the whole's do, is not
    asked for. Outside of a parallelized step it is `kernel` itself.

    Raises OptionError: a rule that cannot be read, here; one that does not fit the arrays, at the call, with its line.
    """
    if not callable(kernel):
        raise OptionError(
            f"partition() takes a function, not {type(kernel).__name__}", where="kernel", remedy="pass it uncalled"
        )
    named = _read_rule(rule, words)
    if not all(isinstance(count, int) and not isinstance(count, bool) and count > 0 for count in parts):
        raise OptionError(
            f"parts={tuple(parts)!r} are no numbers of parts", where="parts", remedy="pass whole numbers from 1 on"
        )

    @functools.wraps(kernel, updated=())
    def partitioned(*args: Any) -> Any:
        leaves, tree = jax.tree.flatten(args)
        line = summarize(current()) or _name(kernel)
        types = _structs(map(jax.typeof, leaves))
        function = FlatKernel(kernel=kernel, tree=tree)
        results = jax.eval_shape(function.call, *types)
        bound = bind_rule(named, types, jax.tree.leaves(results), parts=tuple(parts), where=line)
        values = _partition_p.bind(*leaves, function=function, rule=bound, line=line)  # type: ignore[no-untyped-call]
        return jax.tree.unflatten(jax.tree.structure(results), values)

    return partitioned


def _structs(avals: Iterable[Any]) -> list[Any]:
    return [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]  # type: ignore[no-untyped-call]


def _read_rule(rule: str, words: dict[str, Any]) -> SdyShardingRule:
    """The rule in JAX's own form. Raises OptionError where JAX refuses it."""
    if not isinstance(rule, str):
        raise OptionError(
            f"rule={rule!r} is no text", where="rule", remedy='write a name per dimension, "i k, k j -> i j"'
        )
    factors = {}
    for name, value in words.items():
        kind = name if name in _KINDS else f"{name}_factors"
        if kind in factors:
            raise OptionError(f"{kind} is given twice", where=name, remedy="give it once")
        if kind in _KINDS:
            factors[kind] = (value,) if isinstance(value, str) else tuple(value)
        else:
            factors[name] = value
    named = custom_partitioning(lambda: None)  # type: ignore[no-untyped-call]
    try:
        named.def_partition(None, sharding_rule=rule, **factors)  # type: ignore[no-untyped-call]
    except (ValueError, TypeError) as error:
        raise OptionError(
            f"the rule {rule!r} cannot be read: {error}",
            where="rule",
            remedy='write a name per dimension, "b h t d, b h s d, b h s d -> b h t d"',
        ) from None
    return cast(SdyShardingRule, named.sharding_rule)


def _name(kernel: Any) -> str:
    function = kernel.func if isinstance(kernel, functools.partial) else kernel
    return getattr(function, "__name__", None) or type(function).__name__


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class FlatKernel:
    """A kernel as a function of flat arrays. Equal ones are lowered once: a `functools.partial` by its parts."""

    kernel: Callable[..., Any] = field(compare=False)
    tree: Any
    identity: Any = field(init=False, repr=False)

    def __post_init__(self) -> None:
        identity: Any = self.kernel
        if isinstance(identity, functools.partial):
            identity = (identity.func, identity.args, tuple(sorted(identity.keywords.items())))
        try:
            hash(identity)
        except TypeError:
            identity = id(self.kernel)
        object.__setattr__(self, "identity", identity)

    @property
    def name(self) -> str:
        return _name(self.kernel)

    def call(self, *leaves: Any) -> Any:
        return self.kernel(*jax.tree.unflatten(self.tree, leaves))

    def __call__(self, *leaves: Any) -> list[Any]:
        return jax.tree.leaves(self.call(*leaves))


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class MappedKernel:
    """The same under `vmap`: a dimension more in front of the arguments that have one, and of all results."""

    function: FlatKernel | MappedKernel
    batched: tuple[bool, ...]

    @property
    def name(self) -> str:
        return self.function.name

    def __call__(self, *leaves: Any) -> list[Any]:
        return list(jax.vmap(self.function, in_axes=tuple(0 if has else None for has in self.batched))(*leaves))


# ---- the primitive -----------------------------------------------------------

_partition_p = Primitive("shardwright_partition")
_partition_p.multiple_results = True


def _run(*arguments: Any, function: FlatKernel | MappedKernel, rule: KernelRule, line: str) -> list[Any]:
    return function(*arguments)


def _types_of_results(*types: Any, function: FlatKernel | MappedKernel, rule: KernelRule, line: str) -> list[Any]:
    return [jax.core.ShapedArray(each.shape, each.dtype) for each in jax.eval_shape(function, *_structs(types))]


def _differentiate(*_: Any, line: str, **__: Any) -> Any:
    raise UnsupportedProgramError(
        "a kernel in shardwright.partition has no derivative",
        where=line,
        remedy="write the step's function as a jax.custom_vjp that calls a partitioned kernel forward and another one "
        "backward",
    )


def _batch(
    arguments: Sequence[Any], dims: Sequence[int | None], *, function: FlatKernel | MappedKernel, rule: KernelRule,
    line: str,
) -> tuple[list[Any], list[int]]:  # fmt: skip
    batched = tuple(dim is not None for dim in dims)
    moved = [value if dim is None else jnp.moveaxis(value, dim, 0) for value, dim in zip(arguments, dims, strict=True)]
    size = next(value.shape[0] for value, has in zip(moved, batched, strict=True) if has)
    results = _partition_p.bind(  # type: ignore[no-untyped-call]
        *moved, function=MappedKernel(function=function, batched=batched), rule=rule.map(batched, size), line=line
    )
    return results, [0] * len(results)


def _lower(
    ctx: mlir.LoweringRuleContext, *values: Any, function: FlatKernel | MappedKernel, rule: KernelRule, line: str
) -> Any:
    if not is_lowering_for_us():
        return _lower_as_itself(ctx, *values, function=function, rule=rule, line=line)
    types = _structs(ctx.avals_in)
    (platform,) = ctx.module_context.platforms
    config = encode_forms(lower_forms(function, rule, tuple(types), platform, line))
    call = jax.ffi.build_ffi_lowering_function(KERNEL_TARGET, backend_config=config, api_version=2)
    operation = call(ctx, *values).operation
    ir = private.ir()
    operation.attributes["mhlo.frontend_attributes"] = ir.DictAttr.get(
        {RULE_ATTRIBUTE: ir.StringAttr.get(rule.to_text()), NAME_ATTRIBUTE: ir.StringAttr.get(function.name)}
    )
    return operation.results


_lower_as_itself = mlir.lower_fun(_run, multiple_results=True)

_partition_p.def_impl(_run)  # type: ignore[no-untyped-call]
_partition_p.def_abstract_eval(_types_of_results)  # type: ignore[no-untyped-call]
ad.primitive_jvps[_partition_p] = _differentiate
batching.primitive_batchers[_partition_p] = _batch
mlir.register_lowering(_partition_p, _lower)
