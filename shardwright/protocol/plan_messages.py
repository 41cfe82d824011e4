"""Messages of planning and compiling ↔ our own values: what executors and nodes without a master never load."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields

from shardwright.errors import HloSyntaxError, OptionError, ResourceLimitError
from shardwright.options.plan_options import FORCED_STRATEGIES, REPLICATED, Pin, PlanOptions, TensorPins
from shardwright.options.user_options import check_limits
from shardwright.plans.plan import TEXT_LIMIT_BYTES
from shardwright.progress import PlanProgress
from shardwright.proto.v1 import common_pb2, master_pb2
from shardwright.protocol.wire import TextUnpacker, compress_text
from shardwright.xla.compiled import CompiledProgram, ObservedCollective

# ---- plan options ----------------------------------------------------------

#: Options that a request spells as messages.
_COMPOSITE_OPTIONS = frozenset(
    {"mesh", "force", "argument_axes", "output_axes", "argument_views", "output_views"}
    | {"argument_names", "output_names", "background", "local_arguments", "plan_json"}
)

#: Field of the request → option, of all others: numbers, words and truth values. A field that is not set, or zero or
#: empty where its absence cannot be told, leaves the option at its default.
_OPTION_OF_FIELD = {
    "memory_budget_bytes" if option.name == "memory_budget" else option.name: option.name
    for option in fields(PlanOptions)
    if option.name not in _COMPOSITE_OPTIONS
}


def plan_request(
    options: PlanOptions, *, session_id: str, program_id: str, devices: range | None = None
) -> master_pb2.PlanProgramRequest:
    """The request of a plan under `options`, on these devices of the cluster (default all); `plan_options` reads the
    options back.
    """
    mesh = options.mesh or {}
    request = master_pb2.PlanProgramRequest(
        session_id=session_id,
        program_id=program_id,
        mesh=[common_pb2.MeshAxis(name=name, size=size) for name, size in mesh.items()],
        argument_layouts=_to_pinned_layouts(options.argument_axes, options.argument_views),
        output_layouts=_to_pinned_layouts(options.output_axes, options.output_views),
        argument_names=options.argument_names,
        output_names=options.output_names,
        local_arguments=options.local_arguments,
        first_device=devices.start if devices is not None else 0,
        device_count=len(devices) if devices is not None else 0,
        plan_gzip=compress_text(options.plan_json) if options.plan_json else b"",
        **{field: getattr(options, option) for field, option in _OPTION_OF_FIELD.items()},  # None leaves a field unset
    )
    if isinstance(options.force, str):
        request.forced_strategy = options.force
    elif options.force is not None:
        for pattern, pins in options.force.items():
            request.forced_pins.extend(_pins_to_proto(pattern, pins))
    return request


def _pins_to_proto(pattern: str, pins: TensorPins) -> list[master_pb2.ForcedPin]:
    if isinstance(pins, str):
        return [master_pb2.ForcedPin(name_pattern=pattern, replicated=True)]
    return [
        master_pb2.ForcedPin(name_pattern=pattern, dimension=dimension, axes=_pin_text(pin))
        for dimension, pin in pins.items()
    ]


def plan_options(request: master_pb2.PlanProgramRequest) -> PlanOptions:
    """Raises OptionError on options unknown or mutually exclusive, or on a plan that cannot be unpacked."""
    if request.forced_strategy and request.forced_pins:
        raise OptionError("a forced strategy and forced pins exclude each other", where="force")
    if request.forced_strategy and request.forced_strategy not in FORCED_STRATEGIES:
        remedy = f"one of {', '.join(FORCED_STRATEGIES)}"
        raise OptionError(f"{request.forced_strategy!r} is no strategy", where="force", remedy=remedy)
    pins = _pins_from_proto(request.forced_pins)
    by_name = pins if pins or request.rest not in ("", "search") else None
    options = PlanOptions(
        mesh={axis.name: axis.size for axis in request.mesh} or None,
        force=request.forced_strategy or by_name,
        argument_axes=_axes_by_number(request.argument_layouts),
        output_axes=_axes_by_number(request.output_layouts),
        argument_views=_views_by_number(request.argument_layouts),
        output_views=_views_by_number(request.output_layouts),
        argument_names=tuple(request.argument_names),
        output_names=tuple(request.output_names),
        local_arguments=tuple(request.local_arguments),
        plan_json=_unpack_plan(request.plan_gzip),
        **{
            _OPTION_OF_FIELD[field.name]: value
            for field, value in request.ListFields()
            if field.name in _OPTION_OF_FIELD
        },
    )
    check_limits(options)
    return options


def _unpack_plan(packed: bytes) -> str:
    """JSON of a plan in a request; "": none. Raises OptionError: it cannot be unpacked."""
    if not packed:
        return ""
    unpacker = TextUnpacker("plan", TEXT_LIMIT_BYTES)
    try:
        unpacker.feed(packed)
        return unpacker.text()
    except (HloSyntaxError, ResourceLimitError) as error:
        raise OptionError(error.message, where="plan", remedy="send a plan's JSON, gzip-compressed") from None


def _pins_from_proto(forced_pins: Iterable[master_pb2.ForcedPin]) -> dict[str, TensorPins]:
    by_dim: dict[str, dict[int, Pin]] = {}
    pins: dict[str, TensorPins] = {}
    for forced in forced_pins:
        if forced.replicated:
            pins[forced.name_pattern] = REPLICATED
            continue
        by_dim.setdefault(forced.name_pattern, {})[forced.dimension] = _pin_value(forced.axes)
        pins[forced.name_pattern] = by_dim[forced.name_pattern]
    return pins


def _to_pinned_layouts(
    axes: Mapping[int, tuple[tuple[str, ...], ...]], views: Mapping[int, tuple[int, ...]]
) -> list[master_pb2.PinnedLayout]:
    return [
        master_pb2.PinnedLayout(
            number=number,
            dimensions=[common_pb2.DimensionAxes(axes=dim) for dim in dims],
            view=views.get(number, ()),
        )
        for number, dims in axes.items()
    ]


def _axes_by_number(layouts: Iterable[master_pb2.PinnedLayout]) -> dict[int, tuple[tuple[str, ...], ...]]:
    return {layout.number: tuple(tuple(dim.axes) for dim in layout.dimensions) for layout in layouts}


def _views_by_number(layouts: Iterable[master_pb2.PinnedLayout]) -> dict[int, tuple[int, ...]]:
    return {layout.number: tuple(layout.view) for layout in layouts if layout.view}


def _pin_text(pin: Pin) -> str:
    if pin is None or pin is False:
        return ""
    if pin is True:
        return "*"
    return pin if isinstance(pin, str) else ",".join(pin)


def _pin_value(text: str) -> Pin:
    if text == "":
        return None
    if text == "*":
        return True
    axes = tuple(text.split(","))
    return axes[0] if len(axes) == 1 else axes


def plan_progress_to_proto(step: PlanProgress) -> master_pb2.PlanProgress:
    return master_pb2.PlanProgress(
        phase=step.phase,
        detail=step.detail,
        incumbent_s=step.incumbent_s,
        lower_bound_s=step.lower_bound_s,
        elapsed_s=step.elapsed_s,
    )


def plan_progress_from_proto(message: master_pb2.PlanProgress) -> PlanProgress:
    return PlanProgress(
        phase=message.phase,
        detail=message.detail,
        incumbent_s=message.incumbent_s,
        lower_bound_s=message.lower_bound_s,
        elapsed_s=message.elapsed_s,
    )


# ---- compiled programs -----------------------------------------------------


def load_result(executable_id: str, compiled: CompiledProgram) -> master_pb2.LoadResult:
    """The client's view of a loaded plan; `collectives_from_result` reads its collectives back."""
    memory = compiled.memory
    result = master_pb2.LoadResult(
        executable_id=executable_id,
        compile_s=compiled.emit_s + compiled.compile_s,
        collectives=[
            master_pb2.ObservedCollective(
                kind=collective.kind,
                payload_bytes=collective.payload_bytes,
                wire_bytes=collective.wire_bytes,
                group_size=collective.group_size,
                group_count=collective.group_count,
                executions=collective.count,
                trip_counts_known=collective.trip_counts_known,
                instruction=collective.instruction,
                op_name=collective.op_name,
                groups=collective.groups,
            )
            for collective in compiled.collectives
        ],
    )
    if memory is not None:
        result.arguments_bytes = memory.argument_bytes
        result.outputs_bytes = memory.output_bytes
        result.temporaries_bytes = memory.temporary_bytes
        result.aliased_bytes = memory.alias_bytes
    return result


def collectives_from_result(result: master_pb2.LoadResult) -> tuple[ObservedCollective, ...]:
    return tuple(
        ObservedCollective(
            kind=message.kind,
            payload_bytes=message.payload_bytes,
            wire_bytes=message.wire_bytes,
            group_size=message.group_size,
            group_count=message.group_count,
            count=message.executions,
            trip_counts_known=message.trip_counts_known,
            groups=message.groups,
            instruction=message.instruction,
            op_name=message.op_name,
        )
        for message in result.collectives
    )
