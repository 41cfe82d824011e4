"""The options of `parallelize` and `plan`, checked and put into one `PlanOptions`."""

from __future__ import annotations

import functools
import inspect
import json
import math
import re
import reprlib
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from os import PathLike, fspath
from pathlib import Path
from typing import Annotated, Any, Protocol, TypedDict, TypeVar, Unpack, cast, get_type_hints

from shardwright.errors import OptionError
from shardwright.options.plan_options import (
    CONSTRAINTS,
    EFFORTS,
    FORCED_STRATEGIES,
    FUSED_ATTENTIONS,
    MAX_MESH_AXES,
    MEASURED,
    MODES,
    OFFLOADS,
    REMATS,
    REPLICATED,
    RESTS,
    REWRITES,
    Pin,
    PlanOptions,
    TensorPins,
)
from shardwright.spelling import did_you_mean
from shardwright.tasks.schedules import SCHEDULE_NAMES, Schedule
from shardwright.units import parse_amount, parse_bytes

#: Axis names of a mesh given by sizes only. They are names and nothing more: any axis may split anything.
DEFAULT_AXES = ("data", "model", "sequence")


class StrategyBuilder(Protocol):
    """A builder of `shardwright.strategies`, or one derived from its `Builder`."""

    def build(self, variables: Any, cluster: Any, /) -> Mapping[str, Any]: ...


Mesh = str | tuple[int, ...] | Mapping[str, int] | None
Force = str | Mapping[str, Mapping[int, Pin] | str] | StrategyBuilder | None

#: Bytes, or a text: "25MB", "8MiB".
Bucket = int | str | None

#: Bytes, a part of the device's memory (a float up to 1), or a text: "40GB", "36GiB", "50%".
MemoryBudget = int | float | str | None


class WrittenPlan(Protocol):
    """A plan that writes itself, as `shardwright.Plan` and `PipelinePlan`."""

    def to_json(self) -> str: ...


#: A plan, the path of its file, its JSON text or that text's data.
PlanSource = WrittenPlan | str | PathLike[str] | Mapping[str, Any] | None


class UserOptions(TypedDict, total=False):
    """Options of a plan, with their types and help. Left out or None, the choice is the planner's."""

    plan: Annotated[
        PlanSource,
        "a plan found before, to run instead of a search: a plan, the path of its file, or its JSON; for the same "
        "program it runs as it is, for a changed one its decisions are taken over where they fit, and its notes say "
        "which instructions differ",
    ]
    mesh: Annotated[
        Mesh, 'the mesh, one to three axes: "2x4", (2, 4) or {"data": 2, "model": 4}; default: search the possible ones'
    ]
    force: Annotated[
        Force,
        "a builder of shardwright.strategies, "
        'a strategy ("data", "tensor", "mixed", "megatron", "expert", "zero1", "fsdp", "replicated", or "axes": what '
        "each axis of mesh= says by its name), or argument "
        'name pattern → "replicated" or {dimension: axis, True ("split somewhere") or None ("not split")}; default: '
        "search",
    ]
    rest: Annotated[
        str | None,
        'arguments that force= pins by no name: "search" (default), "replicated": whole on every device, or "data": '
        "the batch is split over all axes, what is computed runs along it, all else is whole on every device",
    ]
    bucket: Annotated[
        Bucket,
        "most bytes that XLA combines into one all-reduce, all-gather or reduce-scatter of many small ones: bytes, "
        '"25MB", "8MiB"; 0: each by itself; default: the compiler\'s',
    ]
    memory_budget: Annotated[
        MemoryBudget,
        'memory of the plan on one device: bytes, "40GB", "36GiB", or a fraction of the device\'s (0.5, "50%"); '
        "default: all of it",
    ]
    deadline: Annotated[
        float | None,
        "seconds until the search ends with its incumbent; a fifth of it later, or 2 seconds, there is a plan or an "
        "error that names the smallest sufficient memory found",
    ]
    effort: Annotated[
        str | None,
        '"fast" searches one mesh, takes the first feasible plan and bounds it weakly; "default" searches all meshes '
        "of up to two axes, refines the best of them to three and closes the gap to the bound to 1 %; "
        '"best" searches three axes outright and prices all plans of experts; "measured" also runs the runners-up '
        "for a few steps each, and keeps the fastest by measurement",
    ]
    rewrites: Annotated[str | None, '"auto" (default): plan a rewritten program where that pays, or "none"']
    remat: Annotated[
        str | None,
        'rematerialization in the backward pass: "auto" (default) by the memory\'s need, "none", or "full"',
    ]
    fused_attention: Annotated[
        str | None,
        'attention that the program writes out, as one fused kernel: "auto" (default) in float16 and bfloat16 on '
        'devices that have it, "on" also in float32, computed in bfloat16 there, and written out where there is no '
        'kernel, or "off"',
    ]
    expert_capacity: Annotated[
        float | None,
        "most rows that one device sends to another one's experts, relative to an even share, where a mixture of "
        "experts sends its rows: those over it are left out, counted, and told after the step; default: room for all "
        "rows, none is left out",
    ]
    offload: Annotated[
        str | None,
        "the optimizer's state in the host's memory, moved to the device for its update and back: "
        '"auto" (default) where nothing faster fits, "none", or "optimizer" always',
    ]
    simple: Annotated[
        bool | None,
        "whether a plan of fewer mesh axes, or fewer collectives, is taken before a faster one that gains less than "
        "1 %, which predictions do not resolve; False: the fastest that fits; default: True",
    ]
    mode: Annotated[str | None, '"search" (default), or "propagate": follow pins and annotations, and search nothing']
    stages: Annotated[
        int | None, "stages of a pipeline, each on devices of its own; 1: no pipeline; default: the planner chooses"
    ]
    micro_batches: Annotated[
        int | None,
        "sequential parts of the batch, their gradients summed: less memory, same result; 1: no split; default: the "
        "planner chooses",
    ]
    micro_batch_inexact: Annotated[
        bool, "allow whole-batch values (batch norm's statistics) per micro-batch; default: False"
    ]
    schedule: Annotated[
        str | None,
        f"order of a pipeline's micro-batches: {', '.join(SCHEDULE_NAMES)}, 3f3b and the like, or "
        "interleaved-4, four chunks a stage; default: the planner chooses",
    ]
    imbalance: Annotated[
        float | None,
        "limit of the slowest stage's excess over the average stage, relative to the average (0.1: a tenth); default: "
        "the minimum",
    ]
    constraints: Annotated[
        str | None,
        'the program\'s own shardings (`with_sharding_constraint`, `in_shardings`, …): "keep" (default) or "ignore"; '
        "annotations count in either case",
    ]
    background: Annotated[
        bool,
        "start with the first plan that fits and search on while the step runs: a plan that is predicted faster by "
        "more than 3 % is compiled beside it, taken over between two calls, measured, and kept where it is faster; "
        "default: False",
    ]


_HINTS = get_type_hints(UserOptions, include_extras=True)

#: Option → its help.
OPTION_HELP: Mapping[str, str] = {name: hint.__metadata__[0] for name, hint in _HINTS.items()}

_PARAMETERS = [
    inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=False if hint.__origin__ is bool else None,
        annotation=hint.__origin__,
    )
    for name, hint in _HINTS.items()
]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def show_options(function: _Function) -> _Function:
    """A function of `**options: Unpack[UserOptions]` with all of them in its signature and help.

    The function raises TypeError on an unknown keyword, with the name most like it.
    """
    signature = inspect.signature(function)
    own = [parameter for parameter in signature.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD]
    known = {parameter.name for parameter in (*own, *_PARAMETERS)}

    @functools.wraps(function)
    def checked(*args: Any, **keywords: Any) -> Any:
        for name in keywords:
            if name not in known:
                fault = f"{function.__name__}() got an unexpected keyword argument {name!r}"
                raise TypeError("; ".join(filter(None, (fault, did_you_mean(name, known)))))
        return function(*args, **keywords)

    lines = [
        textwrap.fill(f"{name}: {text}.", 100, initial_indent="  ", subsequent_indent="    ")
        for name, text in OPTION_HELP.items()
    ]
    checked.__doc__ = "\n".join((inspect.getdoc(function) or "", "", "Options:", *lines))
    checked.__signature__ = signature.replace(parameters=[*own, *_PARAMETERS])  # type: ignore[attr-defined]
    return cast(_Function, checked)


@show_options
def plan_options(**options: Unpack[UserOptions]) -> PlanOptions:
    """The user's options, checked. Raises OptionError that names the option."""
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    budget_bytes, fraction = _memory_budget(given.pop("memory_budget", None))
    checked = PlanOptions(
        mesh=_mesh(given.pop("mesh", None)),
        force=_force(given.pop("force", None), given.get("rest", "search")),
        bucket_bytes=bucket_bytes(given.pop("bucket", None)),
        memory_budget=budget_bytes,
        memory_fraction=fraction,
        deadline_s=given.pop("deadline", None),
        plan_json=read_plan_source(given.pop("plan", None)),
        **given,
    )
    check_limits(checked)
    return checked


def check_limits(options: PlanOptions) -> None:
    """Raises OptionError on a meaningless budget, deadline, effort, mode, rewrites, remat, fused_attention,
    offload, constraints or rest, and on what contradicts a given plan.
    """
    if options.plan_json:
        _require_only_plan(options)
    _one_of("effort", options.effort, (*EFFORTS, MEASURED))
    _one_of("rewrites", options.rewrites, REWRITES)
    _one_of("remat", options.remat, REMATS)
    _one_of("fused_attention", options.fused_attention, FUSED_ATTENTIONS)
    _one_of("offload", options.offload, OFFLOADS)
    _one_of("mode", options.mode, MODES)
    _one_of("constraints", options.constraints, CONSTRAINTS)
    _one_of("rest", options.rest, RESTS)
    for name in ("background", "simple"):
        value = getattr(options, name)
        if not isinstance(value, bool):
            raise OptionError(f"{name} is {value!r}", where=name, remedy="True or False")
    if options.rest != "search" and isinstance(options.force, str):
        raise OptionError(
            f"force={options.force!r} says it of every argument, rest={options.rest!r} of those without a pin",
            where="rest",
            remedy="leave rest= out, or give force= as pins of arguments",
        )
    if options.force == "axes" and options.mesh is None:
        raise OptionError(
            "force='axes' does what the axes of the mesh say, and no mesh is given",
            where="force",
            remedy='give one such as mesh={"data": 2, "fsdp": 4}',
        )
    stages = options.stages
    if stages is not None and (isinstance(stages, bool) or not isinstance(stages, int) or stages < 1):
        raise OptionError(f"{stages!r} stages", where="stages", remedy="give a number from 1, or None")
    if options.schedule is not None:
        Schedule.parse(options.schedule)
    imbalance = options.imbalance
    if imbalance is not None and not (_is_number(imbalance) and 0 <= imbalance < math.inf):
        raise OptionError(f"an imbalance of {imbalance!r}", where="imbalance", remedy="give a part from 0, or None")
    capacity = options.expert_capacity
    if capacity is not None and not (_is_number(capacity) and 1 <= capacity < math.inf):
        raise OptionError(
            f"an experts' capacity of {capacity!r}",
            where="expert_capacity",
            remedy="give a multiple of an even share, from 1: 1.25; or None, which has room for all rows",
        )
    if options.mode == "propagate" and isinstance(options.force, str):
        raise OptionError(
            f"mode='propagate' follows annotations, force={options.force!r} is a strategy of its own",
            where="mode",
            remedy="leave one of them out, or give force= as pins of arguments",
        )
    micro_batches = options.micro_batches
    if micro_batches is not None and not (type(micro_batches) is int and micro_batches >= 1):
        raise OptionError(
            f"{micro_batches!r} micro-batches", where="micro_batches", remedy="give a number from 1, or None"
        )
    bucket = options.bucket_bytes
    if bucket is not None and not (type(bucket) is int and 0 <= bucket < 1 << 63):
        raise OptionError(
            f"a bucket of {bucket!r} bytes", where="bucket", remedy='write bytes from 0, "25MB" or "8MiB"'
        )
    check_deadline(options.deadline_s)
    fraction, budget = options.memory_fraction, options.memory_budget
    if fraction is not None and not (_is_number(fraction) and 0 < fraction <= 1):
        raise OptionError(
            f"a budget of {fraction!r} of the device's memory", where="memory_budget",
            remedy="give a part up to 1.0, or bytes as an integer",
        )  # fmt: skip
    if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int) or budget <= 0):
        raise OptionError(f"a budget of {budget!r} bytes", where="memory_budget", remedy="give bytes, more than 0")
    if budget is not None and fraction is not None:
        raise OptionError(
            "a budget in bytes and one as a part of the memory", where="memory_budget", remedy="give one of them"
        )


#: Options beside `plan=`: what the plan may take, and names. They choose nothing in it.
_BESIDE_PLAN = frozenset({
    "plan_json", "memory_budget", "memory_fraction", "deadline_s", "constraints", "local_arguments", "argument_names",
    "output_names", "expert_capacity",
})  # fmt: skip


def _require_only_plan(options: PlanOptions) -> None:
    """Raises OptionError on an option that chooses what the given plan says already."""
    for option in fields(PlanOptions):
        value = getattr(options, option.name)
        default = option.default if option.default is not MISSING else {}
        if option.name not in _BESIDE_PLAN and value != default:
            name = option.name.removesuffix("_bytes")
            raise OptionError(
                f"{name}= and plan=, which says it already",
                where=name,
                remedy="leave one of them out; memory_budget= and deadline= go with a plan",
            )


def read_plan_source(source: PlanSource) -> str:
    """JSON text of a plan as users give it; "": none. Raises OptionError: no plan, or a file that cannot be read."""
    if source is None:
        return ""
    if isinstance(source, Mapping):
        return json.dumps(source)
    write = getattr(source, "to_json", None)
    if callable(write):
        return str(write())
    if isinstance(source, str) and source.lstrip().startswith("{"):
        return source
    if not isinstance(source, str | PathLike):
        raise OptionError(
            f"{type(source).__name__} is no plan", where="plan", remedy="pass a plan, the path of its file, or its JSON"
        )
    try:
        return Path(source).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "it is no text"
        raise OptionError(
            f"the plan cannot be read: {why}",
            where=f"plan={fspath(source)!r}",
            remedy="name a file that `shardwright plan --out` or Plan.to_json wrote",
        ) from None


def check_deadline(seconds: Any, where: str = "deadline") -> None:
    """Raises OptionError unless it is None or a positive, finite number of seconds. where: name of the option."""
    if seconds is not None and not (_is_number(seconds) and 0 < seconds < math.inf):
        raise OptionError(
            f"a deadline of {seconds!r}", where=where, remedy="give seconds, more than 0, or leave it out"
        )


def _one_of(option: str, value: Any, choices: Sequence[str]) -> None:
    if value not in choices:
        raise OptionError(f"{option} is {value!r}", where=option, remedy=f"one of {', '.join(choices)}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def bucket_bytes(bucket: Bucket) -> int | None:
    """Bytes of a bucket as users write it. Raises OptionError on a text that is no size."""
    return parse_bytes(bucket, where="bucket") if isinstance(bucket, str) else bucket


def _memory_budget(budget: MemoryBudget) -> tuple[int | None, float | None]:
    """(bytes, part of the device's memory); at most one of them is given."""
    if isinstance(budget, float):
        return None, budget
    if budget is None or isinstance(budget, int):
        return budget, None
    text = str(budget)
    size_bytes, percent = parse_amount(text)
    if size_bytes is None and percent is None:
        raise OptionError(
            f"{text!r} is no amount of memory", where="memory_budget", remedy='write "40GB", "36GiB", "50%" or bytes'
        )
    return size_bytes, None if percent is None else percent / 100


def _mesh(mesh: Mesh) -> dict[str, int] | None:
    if mesh is None:
        return None
    if isinstance(mesh, str):
        if not re.fullmatch(r"\d+(x\d+)*", mesh):
            raise OptionError(f"{mesh!r} is no mesh", where="mesh", remedy='write sizes, such as "8" or "2x4"')
        mesh = tuple(int(size) for size in mesh.split("x"))
    sizes = dict(mesh) if isinstance(mesh, Mapping) else dict(zip(DEFAULT_AXES, mesh, strict=False))
    if not 1 <= len(mesh) <= MAX_MESH_AXES:
        raise OptionError(f"a mesh of {len(mesh)} axes", where="mesh", remedy="use one, two or three axes")
    for name, size in sizes.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise OptionError(
                f"mesh axis name {name!r} is not an identifier", where="mesh", remedy='write one such as "data"'
            )
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise OptionError(f"mesh axis {name!r} has size {size!r}", where="mesh", remedy="give integers from 1")
    return sizes


def _force(force: Force, rest: str) -> str | dict[str, TensorPins] | None:
    if force is None:
        return None if rest == "search" else {}
    if _is_plan(force):
        raise OptionError("force= takes no plan: plan= runs one that was found before", where="force")
    if isinstance(force, str):
        if force not in FORCED_STRATEGIES:
            raise OptionError(
                f"{force!r} is no strategy", where="force", remedy=f"one of {', '.join(FORCED_STRATEGIES)}"
            )
        return force
    if not isinstance(force, Mapping):
        raise OptionError(
            f"force is {reprlib.repr(force)}",
            where="force",
            remedy='e.g. "data", or {"params[\'w\']": {0: "model", 1: None}}',
        )
    return {pattern: _tensor_pins(pattern, pins) for pattern, pins in force.items()}


def _is_plan(force: Force) -> bool:
    """Whether it is a plan, its file or its JSON, which users may mean by `force`."""
    if isinstance(force, str):
        return force.endswith(".json") or force.lstrip().startswith("{")
    if isinstance(force, Mapping):
        return "hlo_sha256" in force
    return isinstance(force, PathLike) or callable(getattr(force, "to_json", None))


def _tensor_pins(pattern: str, pins: Mapping[int, Pin] | str) -> TensorPins:
    if isinstance(pins, Mapping):
        return dict(pins)
    if pins != REPLICATED:
        raise OptionError(
            f"{pins!r} is no pin of a tensor",
            where=f"force[{pattern!r}]",
            remedy=f'"{REPLICATED}", or dimension → axis, e.g. {{0: "model", 1: None}}',
        )
    return REPLICATED


def name_matches(pattern: str, name: str) -> bool:
    """Whether a pattern of `force` names an argument: `*` and `?` are wildcards, brackets stand for themselves."""
    wanted = re.escape(pattern).replace(r"\*", ".*").replace(r"\?", ".")
    return pattern == name or re.fullmatch(wanted, name) is not None
