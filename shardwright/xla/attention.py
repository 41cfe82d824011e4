"""Attention calls as devices compute them: part by part, by cuDNN or written out.

Each device's part is computed in a manual computation: batch, query heads with their key heads, rows of q. On CUDA it
is cuDNN's call with the part's sizes in its configuration; operands in float32, which it has no kernel for, are rounded
to bfloat16 around it. Everywhere else it is written out (`written_attention`).

Where the query heads of a part are not all those of its key heads, the device picks the key heads that they read, and
adds their gradients back into an array of all. Where rows are split, causal masks and windows become a bias of the
device's own rows, and lengths of q are counted from its first row: a configuration is one for all devices.

Dropout: cuDNN's seed is in the configuration, one for all devices, and its counters are a part's own. The rate holds, a
plan gives the same result each time, and parts repeat the same random numbers on other data. Where a forward call and
its backward call are split otherwise, both are written out: they would not drop the same. Written out, the plan does
not change the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardwright.attention import HIDDEN_BIAS, AttentionCall, read_form
from shardwright.cost import hardware_profile, platform_of_profile
from shardwright.cost.attention import runs_fused
from shardwright.cost.profiles import AttentionKernel
from shardwright.errors import UnsupportedProgramError
from shardwright.hlo import ArrayShape, TupleShape
from shardwright.plans.plan import InstructionPlan
from shardwright.plans.shardings import Mesh, TensorSharding
from shardwright.xla import private, tensors
from shardwright.xla.attention_parts import AttentionParts, split_attention
from shardwright.xla.manual_region import ManualRegion, PartResult, first_numbers, pad_to_parts, replace_elements
from shardwright.xla.written_attention import write_attention

#: Platforms that have cuDNN's kernels, as JAX names them.
_CUDA = ("cuda", "gpu")

#: Whose kernel stands for that of a profile that is not here.
_NEWEST_GPU = "b200"


def read_operation(operation: Any) -> AttentionCall | None:
    """The attention of a custom call in converted HLO; None for any other operation."""
    if operation.operation.name != "stablehlo.custom_call":
        return None
    result = operation.results[0].type
    config = operation.attributes.get("backend_config")
    if not isinstance(result, private.ir().TupleType) or not isinstance(config, private.ir().StringAttr):
        return None
    operands = tuple(_array(operand.type) for operand in operation.operands)
    results = TupleShape(tuple(_array(result.get_type(number)) for number in range(result.num_types)))
    return read_form(operation.attributes["call_target_name"].value, config.value, operands, results)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedCall:
    """An attention call of a program. entry: the plan of it, or None: whole on every device."""

    operation: Any
    call: AttentionCall
    entry: InstructionPlan | None

    @property
    def used(self) -> list[TensorSharding]:
        """How its operands lie."""
        if self.entry is not None:
            return [leaf for operand in self.entry.operands for leaf in operand]
        return [TensorSharding.replicated(operand.type.rank) for operand in self.operation.operands]


def kernel_of_devices(hardware: str, platform: str | None) -> AttentionKernel | None:
    """cuDNN's kernel on the devices that a program is emitted for; None: attention is written out.

    hardware: the plan's profile; one that is not here is taken for a GPU. platform: of the devices, in JAX's spelling;
    None: the profile's.
    """
    own = platform_of_profile(hardware)
    if (platform or own or "cuda") not in _CUDA:
        return None
    return hardware_profile(hardware if own else _NEWEST_GPU).attention


def compute_attention(
    calls: Sequence[PlannedCall],
    mesh: Mesh,
    attribute: Callable[[TensorSharding], Any],
    kernel: AttentionKernel | None,
) -> None:
    """Put their parts in place of calls. attribute: a sharding in Shardy's form. kernel: the devices'.

    Operands must have the layouts of the plan's uses. A whole call that devices have a kernel for stays.
    """
    parts = [split_attention(each.call, each.used, mesh) for each in calls]
    apart = _dropped_apart(parts)
    for each, own in zip(calls, parts, strict=True):
        has_kernel = _takes(own.part, kernel) and _dropout_of(own.whole) not in apart
        _replace_by_parts(each, own, mesh, attribute, has_kernel=has_kernel)


def _takes(part: AttentionCall, kernel: AttentionKernel | None) -> bool:
    """Whether the kernel computes a device's part. With a bias it takes even numbers of rows and keys (jax 0.10.2,
    `check_is_flash_attention`)."""
    return runs_fused(part, kernel) and not (part.bias and (part.rows % 2 or part.keys % 2))


def _dropout_of(call: AttentionCall) -> tuple[float, ...]:
    """What the random numbers of a call depend on; the forward and backward call of one attention are equal."""
    return (call.dropout_rate, call.seed, call.batch, call.heads, call.rows, call.keys)


def _dropped_apart(parts: Sequence[AttentionParts]) -> set[tuple[float, ...]]:
    """Dropout of calls that are not all split alike: kernels would not drop the same forward and backward."""
    ways: dict[tuple[float, ...], list[list[tuple[str, ...]]]] = {}
    for each in parts:
        if each.whole.dropout_rate:
            axes = [each.offsets[name].axes for name in ("batch", "heads", "rows")]
            ways.setdefault(_dropout_of(each.whole), []).append(axes)
    return {dropout for dropout, splits in ways.items() if any(split != splits[0] for split in splits)}


def _replace_by_parts(
    each: PlannedCall,
    parts: AttentionParts,
    mesh: Mesh,
    attribute: Callable[[TensorSharding], Any],
    *,
    has_kernel: bool,
) -> None:
    operation, call = each.operation, each.call
    if call.is_f8 and not has_kernel:
        raise UnsupportedProgramError(
            "attention in 8-bit floats runs by cuDNN alone, on GPUs from Hopper on",
            where=call.target,
            remedy="write the attention in bfloat16 for these devices",
        )
    if not parts.is_split and has_kernel and call.element_type != "f32":
        return
    roles = list(parts.results)
    types = [operation.results[0].type.get_type(number) for number in range(len(roles))]
    with operation.location, private.ir().InsertionPoint(operation):
        if parts.is_split:
            values = _compute_in_region(operation, parts, each.used, types, mesh, attribute, has_kernel=has_kernel)
        else:
            arrays = dict(zip(call.operands, operation.operands, strict=True))
            firsts = dict.fromkeys(parts.offsets, _scalar(0))
            values = _compute_part(parts, arrays, firsts, has_kernel=has_kernel)
        workspace = tensors.number(0, tensors.tensor_type((0,), tensors.element_type("u8")))
    replace_elements(operation, [*(values[role] for role in roles), workspace])
    operation.operation.erase()


def _compute_in_region(
    operation: Any,
    parts: AttentionParts,
    used: Sequence[TensorSharding],
    types: Sequence[Any],
    mesh: Mesh,
    attribute: Callable[[TensorSharding], Any],
    *,
    has_kernel: bool,
) -> dict[str, Any]:
    """The whole results by role, of parts computed in a manual computation. types: of the whole results."""
    call = parts.whole
    names = _offsets_needed(parts, has_kernel=has_kernel)
    numbers = [first_numbers(parts.offsets[name].axes, parts.offsets[name].step, mesh) for name in names]
    operands = pad_to_parts(operation.operands, used, mesh) + [array for array, _ in numbers]
    results = [
        PartResult(whole=kind, lies=lies, summed=parts.summed[role], takes_largest=role.startswith("amax"))
        for kind, (role, lies) in zip(types, parts.results.items(), strict=True)
    ]
    region = ManualRegion(operands, [*used, *(lies for _, lies in numbers)], results, mesh, attribute)
    count = len(call.operands)
    with region:
        arrays = dict(zip(call.operands, region.arguments[:count], strict=True))
        firsts = dict(zip(names, (tensors.reshape(each, ()) for each in region.arguments[count:]), strict=True))
        values = _compute_part(parts, arrays, firsts, has_kernel=has_kernel)
        region.hand_out([values[role] for role in parts.results])
    return dict(zip(parts.results, region.join(), strict=True))


def _offsets_needed(parts: AttentionParts, *, has_kernel: bool) -> list[str]:
    names = ["batch", "heads", "rows"] if parts.whole.dropout_rate and not has_kernel else []
    if parts.counts_rows and "rows" not in names:
        names.append("rows")
    return [*names, "picked"] if parts.shared_by else names


def _compute_part(
    parts: AttentionParts, arrays: Mapping[str, Any], firsts: Mapping[str, Any], *, has_kernel: bool
) -> dict[str, Any]:
    """One device's results by role, of its operands by role. firsts: the numbers of its first elements, scalars."""
    part, arrays = parts.part, dict(arrays)
    if parts.shared_by:
        for role in ("k", "v"):
            arrays[role] = _pick_heads(parts, arrays[role], firsts["picked"])
    if parts.counts_rows and part.has_lengths:
        arrays["q_lengths"] = _lengths_from(firsts["rows"], arrays["q_lengths"], part.rows)
    if parts.masks_by_bias:
        arrays["bias"] = _mask_by_bias(parts, arrays.get("bias"), firsts["rows"])
    values = _call_kernel(part, arrays) if has_kernel else write_attention(part, arrays, firsts)
    if parts.shared_by and part.backward:
        for role in ("dk", "dv"):
            values[role] = _put_back(parts, values[role], firsts["picked"])
    return values


# ---- cuDNN -------------------------------------------------------------------
def _call_kernel(call: AttentionCall, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """cuDNN's call of operands by role."""
    if call.element_type == "f32":
        bf16, f32 = tensors.element_type("bf16"), tensors.element_type("f32")
        narrow = {
            role: array if role == "statistics" or role.endswith("lengths") else tensors.convert(array, bf16)
            for role, array in arrays.items()
        }
        values = _call_kernel(replace(call, element_type="bf16"), narrow)
        return {role: tensors.convert(value, f32) for role, value in values.items()}
    ir = private.ir()
    results = call.result_shape.leaves
    attributes = {
        "call_target_name": ir.StringAttr.get(call.target),
        "api_version": ir.IntegerAttr.get(ir.IntegerType.get_signless(32), 2),  # API_VERSION_STATUS_RETURNING
        "backend_config": ir.StringAttr.get(call.backend_config),
        "operand_layouts": _layouts(call.operand_shapes),
        "result_layouts": _layouts(results),
    }
    operation = ir.Operation.create(
        "stablehlo.custom_call",
        results=[tensors.tensor_type(each.dimensions, tensors.element_type(each.element_type)) for each in results],
        operands=[arrays[role] for role in call.operands],
        attributes=attributes,
    )
    values = dict(zip(call.results, operation.results, strict=True))
    return {role: value for role, value in values.items() if role != "workspace"}


def _layouts(shapes: Sequence[ArrayShape]) -> Any:
    each = (f"dense<[{shape.layout}]> : tensor<{len(shape.dimensions)}xindex>" for shape in shapes)
    return private.ir().Attribute.parse(f"[{', '.join(each)}]")


# ---- key heads ---------------------------------------------------------------
def _pick_heads(parts: AttentionParts, array: Any, first: Any) -> Any:
    """The key heads that a device's query heads read, of an operand of more; first: the first query head's number."""
    dim = 2 if parts.part.rows_first else 1
    stablehlo = private.dialect("stablehlo")
    sizes = list(array.type.shape)
    sizes[dim] = 1
    heads = []
    for number in _picked_numbers(parts, first):
        starts = [_scalar(0)] * len(sizes)
        starts[dim] = number
        heads.append(stablehlo.DynamicSliceOp(array, starts, sizes).result)
    return stablehlo.ConcatenateOp(heads, dim).result if len(heads) > 1 else heads[0]


def _put_back(parts: AttentionParts, array: Any, first: Any) -> Any:
    """The gradient of all the device's key heads, of those that its query heads read: zeros for others."""
    stablehlo = private.dialect("stablehlo")
    batch, _, *other = array.type.shape
    heads = parts.kv_heads
    f32, shape = tensors.element_type("f32"), [batch, heads, *other]
    total = None
    for place, number in enumerate(_picked_numbers(parts, first)):
        of_head = stablehlo.SliceOp(array, [0, place, 0, 0], [batch, place + 1, *other], [1] * 4).result
        spread = tensors.convert(tensors.broadcast(of_head, shape, range(4)), f32)
        numbers = tensors.iota(shape, 1, tensors.element_type("s32"))
        is_read = tensors.compare(numbers, tensors.broadcast(number, shape, []), "EQ")
        term = tensors.select(is_read, spread, tensors.like(0.0, spread))
        total = term if total is None else stablehlo.AddOp(total, term).result
    return tensors.convert(total, array.type.element_type)


def _picked_numbers(parts: AttentionParts, first: Any) -> list[Any]:
    """The number of the key head of each block of query heads that share one."""
    stablehlo = private.dialect("stablehlo")
    block = parts.part.heads // parts.part.kv_heads
    numbers = []
    for place in range(parts.part.kv_heads):
        head = stablehlo.AddOp(first, _scalar(place * block)).result
        numbers.append(stablehlo.DivOp(head, _scalar(parts.shared_by)).result)
    return numbers


# ---- rows --------------------------------------------------------------------
def _lengths_from(first: Any, lengths: Any, rows: int) -> Any:
    """Lengths, counted from a device's first row, within its rows."""
    stablehlo = private.dialect("stablehlo")
    counted = stablehlo.SubtractOp(lengths, tensors.broadcast(first, lengths.type.shape, [])).result
    return stablehlo.ClampOp(_scalar(0), counted, _scalar(rows)).result


def _mask_by_bias(parts: AttentionParts, bias: Any, first: Any) -> Any:
    """The bias, and a number that hides for keys that a causal mask or a window hides from the device's rows."""
    stablehlo = private.dialect("stablehlo")
    call, part = parts.whole, parts.part
    s32, shape = tensors.element_type("s32"), [part.rows, part.keys]
    row = stablehlo.AddOp(tensors.iota(shape, 0, s32), tensors.broadcast(first, shape, [])).result
    ahead = stablehlo.SubtractOp(row, tensors.iota(shape, 1, s32)).result
    visible = tensors.compare(ahead, tensors.like(0, ahead), "GE")
    if call.window:
        near = tensors.compare(ahead, tensors.like(call.window, ahead), "LT")
        visible = stablehlo.AndOp(visible, near).result
    kind = tensors.tensor_type(part.bias, tensors.element_type(part.element_type))
    if bias is None:
        bias = tensors.number(0.0, kind)
    visible = tensors.broadcast(visible, part.bias, [2, 3])
    return tensors.select(visible, bias, tensors.number(HIDDEN_BIAS[part.element_type], kind))


def _scalar(value: int) -> Any:
    return tensors.number(value, tensors.tensor_type((), tensors.element_type("s32")))


def _array(kind: Any) -> ArrayShape:
    """An array's type as HLO has it."""
    element = str(kind.element_type).lower()
    return ArrayShape(element, tuple(kind.shape))
