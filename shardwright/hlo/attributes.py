"""Values of instruction and module attributes: `name=text` → a Python value.

| text | value |
|---|---|
| `3`, `-1`, `0.5`, `true`, `EQ` | int, float, bool, str |
| `"a\\"b"` | str, unescaped |
| `{1,2}`, `{{0,1},{2,3}}`, `{highest,default}` | tuple, nested as written |
| `window=`, `dim_labels=` | `Window`, `ConvDims` |
| `slice=`, `padding=` | tuple of `(start, limit, stride)`, of `(low, high, interior)` |
| `metadata=`, `frontend_attributes=` | dict |
| `input_output_alias=`, `buffer_donor=` | tuple of `Alias`, of `Donor` |
| `replica_groups=` in any of its three forms | tuple of tuples of device numbers |
| anything else | the text |
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shardwright.hlo.ir import Alias, Donor
from shardwright.hlo.lexical import STRING, WORD_CHARACTER, value_end
from shardwright.hlo.replica_groups import parse_replica_groups
from shardwright.hlo.sharding_text import check_sharding
from shardwright.hlo.strings import unescape

#: Attributes whose value names computations of the module.
COMPUTATION_ATTRIBUTES = frozenset(
    (
        "to_apply",
        "calls",
        "body",
        "condition",
        "select",
        "scatter",
        "branch_computations",
        "true_computation",
        "false_computation",
        "called_computations",
    )
)


class AttributeValueError(ValueError):
    """An attribute's text has not the form required by its name; the message names the expected form."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A window of convolution and reduce-window: one entry per dimension in each field."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    padding_low: tuple[int, ...]
    padding_high: tuple[int, ...]
    lhs_dilation: tuple[int, ...]
    rhs_dilation: tuple[int, ...]
    reversal: tuple[bool, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvDims:
    """Which dimension of a convolution's input, kernel and output is what (`b01f_01io->b01f`)."""

    input_batch: int
    input_feature: int
    input_spatial: tuple[int, ...]
    kernel_input_feature: int
    kernel_output_feature: int
    kernel_spatial: tuple[int, ...]
    output_batch: int
    output_feature: int
    output_spatial: tuple[int, ...]


_INT = re.compile(r"-?[0-9]{1,20}", re.ASCII)
_FLOAT = re.compile(r"-?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?", re.ASCII)
_INT_LIST = re.compile(r"\{\s*(?:-?[0-9]{1,20}\s*(?:,\s*-?[0-9]{1,20}\s*)*+)?\}", re.ASCII)
_NESTED_WORDS = re.compile(r"[{},]|[^\s{},]+")
_WORD = re.compile(r"%?[A-Za-z0-9_.+\-]+", re.ASCII)
_NUMBER = re.compile(r"-?[0-9]{1,20}", re.ASCII)
_SUB_NAME = re.compile(r"\s*+,?\s*+([A-Za-z_][A-Za-z0-9_.\-]*+)=\s*+", re.ASCII)


def _parse_int(text: str) -> int:
    if not _NUMBER.fullmatch(text):
        raise AttributeValueError(f"expected an integer, got {text[:40]!r}")
    return int(text)


def _parse_nested(text: str) -> Any:
    """A braced, possibly nested list of numbers and words → tuples; None where it is something else."""
    stack: list[list[Any]] = []
    expect_item = True
    closed_empty = False
    for match in _NESTED_WORDS.finditer(text):
        token = match[0]
        if token == "{":
            if not expect_item or len(stack) > 8:
                return None
            stack.append([])
            closed_empty = True
            continue
        if token == "}":
            if expect_item and not closed_empty:
                return None
            done = tuple(stack.pop())
            if not stack:
                return done if match.end() == len(text) else None
            stack[-1].append(done)
            expect_item = False
        elif token == ",":
            if expect_item:
                return None
            expect_item = True
        else:
            if not expect_item or not _WORD.fullmatch(token):
                return None
            stack[-1].append(_scalar(token.removeprefix("%")))
            expect_item = False
        closed_empty = False
    return None


def _scalar(text: str) -> Any:
    if _INT.fullmatch(text):
        return int(text)
    if text == "true":
        return True
    if text == "false":
        return False
    if _FLOAT.fullmatch(text):
        return float(text)
    return text


def _generic(text: str) -> Any:
    first = text[0]
    if first == '"':
        return unescape(text)
    if first == "{":
        if _INT_LIST.fullmatch(text):
            return _int_list(text)
        value = _parse_nested(text)
        return text if value is None else value
    return _scalar(text)


def _parse_by_x(name: str, text: str) -> tuple[int, ...]:
    parts = text.split("x")
    if not all(map(_NUMBER.fullmatch, parts)):
        raise AttributeValueError(f"expected {name}= with numbers joined by x, such as 3x3, got {text[:40]!r}")
    return tuple(map(int, parts))


def _parse_window(text: str) -> Window:
    fields = dict(_sub_attributes(text))
    unknown = fields.keys() - {"size", "stride", "pad", "lhs_dilate", "rhs_dilate", "rhs_reversal"}
    if unknown:
        raise AttributeValueError(f"a window has no field {min(unknown)!r}")
    sizes = _parse_by_x("size", fields["size"]) if "size" in fields else ()
    rank = len(sizes)

    def field(name: str, default: int) -> tuple[int, ...]:
        values = _parse_by_x(name, fields[name]) if name in fields else (default,) * rank
        if len(values) != rank:
            raise AttributeValueError(f"{name} has {len(values)} dimensions, size has {rank}")
        return values

    pads = (
        [tuple(map(_parse_int, pad.split("_"))) for pad in fields["pad"].split("x")]
        if "pad" in fields
        else [(0, 0)] * rank
    )
    if len(pads) != rank or any(len(pad) != 2 for pad in pads):
        raise AttributeValueError(f"expected pad= with {rank} low_high pairs joined by x, got {fields['pad'][:40]!r}")
    return Window(
        sizes=sizes,
        strides=field("stride", 1),
        padding_low=tuple(pad[0] for pad in pads),
        padding_high=tuple(pad[1] for pad in pads),
        lhs_dilation=field("lhs_dilate", 1),
        rhs_dilation=field("rhs_dilate", 1),
        reversal=tuple(map(bool, field("rhs_reversal", 0))),
    )


_DIM_LABELS = re.compile(r"([0-9bf?]{2,})_([0-9io?]{2,})->([0-9bf?]{2,})")


def _positions(labels: str, first: str, second: str) -> tuple[int, int, tuple[int, ...]]:
    spatial = [character for character in labels if character.isdigit()]
    wanted = [str(number) for number in range(len(spatial))]
    if labels.count(first) != 1 or labels.count(second) != 1 or sorted(spatial) != wanted:
        raise AttributeValueError(
            f"expected one {first!r}, one {second!r} and the spatial numbers from 0 on, each once, in {labels[:40]!r}"
        )
    return labels.index(first), labels.index(second), tuple(labels.index(number) for number in wanted)


def _parse_dim_labels(text: str) -> ConvDims:
    match = _DIM_LABELS.fullmatch(text)
    if match is None or any(len(labels) > 12 for labels in match.groups()):
        raise AttributeValueError(f"expected dimension labels such as b01f_01io->b01f, got {text[:40]!r}")
    input_batch, input_feature, input_spatial = _positions(match[1], "b", "f")
    kernel_input, kernel_output, kernel_spatial = _positions(match[2], "i", "o")
    output_batch, output_feature, output_spatial = _positions(match[3], "b", "f")
    if not len(input_spatial) == len(kernel_spatial) == len(output_spatial):
        raise AttributeValueError(f"input, kernel and output of {text!r} differ in their number of spatial dimensions")
    return ConvDims(
        input_batch=input_batch,
        input_feature=input_feature,
        input_spatial=input_spatial,
        kernel_input_feature=kernel_input,
        kernel_output_feature=kernel_output,
        kernel_spatial=kernel_spatial,
        output_batch=output_batch,
        output_feature=output_feature,
        output_spatial=output_spatial,
    )


_SLICE = re.compile(r"\{\s*(?:(\[[0-9:\s]*\])\s*(?:,\s*\[[0-9:\s]*\]\s*)*+)?\}", re.ASCII)
_RANGE = re.compile(r"\[\s*([0-9]{1,19})\s*:\s*([0-9]{1,19})\s*(?::\s*([0-9]{1,19})\s*)?\]", re.ASCII)


def _parse_slice(text: str) -> tuple[tuple[int, int, int], ...]:
    if not _SLICE.fullmatch(text) or text.count("[") != len(ranges := _RANGE.findall(text)):
        raise AttributeValueError(f"expected ranges such as {{[0:3], [1:4:2]}}, got {text[:60]!r}")
    return tuple((int(start), int(limit), int(stride or 1)) for start, limit, stride in ranges)


def _parse_padding(text: str) -> Any:
    if not text[0].isdigit() and text[0] != "-":
        return _generic(text)  # PADDING_SAME and the like
    result = []
    for part in text.split("x"):
        numbers = tuple(map(_parse_int, part.split("_")))
        if len(numbers) not in (2, 3):
            raise AttributeValueError(f"expected low_high or low_high_interior, got {part[:40]!r}")
        result.append((numbers[0], numbers[1], numbers[2] if len(numbers) == 3 else 0))
    return tuple(result)


def _sub_attributes(text: str) -> list[tuple[str, str]]:
    """The `name=value` pairs inside braces, separated by spaces or commas."""
    if text[0] != "{" or text[-1] != "}":
        raise AttributeValueError(f"expected {{name=value …}}, got {text[:40]!r}")
    pairs = []
    position, end = 1, len(text) - 1
    while match := _SUB_NAME.match(text, position, end):
        position = value_end(text, match.end())
        if position > end or position == match.end():
            raise AttributeValueError(f"expected a value after {match[1]}=")
        pairs.append((match[1], text[match.end() : position]))
    if text[position:end].strip():
        raise AttributeValueError(f"expected name=value, got {text[position:end].strip()[:40]!r}")
    return pairs


#: The usual metadata: strings and numbers, no braces. Groups: name, string, word.
_PLAIN_FIELD = re.compile(rf"\s*+([a-z_]++)=(?:({STRING})|({WORD_CHARACTER}++))", re.ASCII | re.DOTALL)


_METADATA_STRINGS = ("op_name", "op_type", "source_file", "deduplicated_name", "scheduling_name")
_METADATA_INTS = ("stack_frame_id", "source_line", "source_end_line", "source_column", "source_end_column")


def _parse_metadata(text: str) -> dict[str, Any]:
    metadata = _read_metadata(text)
    for name in _METADATA_STRINGS:
        if name in metadata and type(metadata[name]) is not str:
            raise AttributeValueError(f"expected a string after {name}=")
    for name in _METADATA_INTS:
        if name in metadata and type(metadata[name]) is not int:
            raise AttributeValueError(f"expected an integer after {name}=")
    return metadata


def _read_metadata(text: str) -> dict[str, Any]:
    if "={" in text:
        return {name: _generic(value) for name, value in _sub_attributes(text)}
    result: dict[str, Any] = {}
    position, end = 1, len(text) - 1
    while match := _PLAIN_FIELD.match(text, position, end):
        name, string, word = match.groups()
        if string is not None:
            result[name] = unescape(string) if "\\" in string else string[1:-1]
        else:
            result[name] = _scalar(word)
        position = match.end()
    if text[position:end].strip():
        return {name: _generic(value) for name, value in _sub_attributes(text)}
    return result


def _parse_frontend_attributes(text: str) -> dict[str, str]:
    return {name: unescape(value) if value[0] == '"' else value for name, value in _sub_attributes(text)}


_ALIAS = re.compile(
    r"\s*\{\s*([0-9,\s]*)\}\s*:\s*\(\s*([0-9]{1,19})\s*,\s*\{\s*([0-9,\s]*)\}\s*(?:,\s*(may-alias|must-alias)\s*)?\)\s*",
    re.ASCII,
)


def _index(text: str) -> tuple[int, ...]:
    return tuple(map(_parse_int, map(str.strip, text.split(",")))) if text.strip() else ()


def _parse_aliases(text: str) -> tuple[Alias, ...]:
    aliases: list[Alias] = []
    position, end = 1, len(text) - 1
    while text[position:end].strip():
        match = _ALIAS.match(text, position, end)
        if match is None:
            raise AttributeValueError("expected {output index}: (parameter, {parameter index}, may-alias)")
        aliases.append(Alias(_index(match[1]), int(match[2]), _index(match[3]), match[4] or "may-alias"))
        position = match.end()
        if position < end:
            if text[position] != ",":
                raise AttributeValueError("expected ',' between aliases")
            position += 1
    return tuple(aliases)


_DONOR = re.compile(r"\(\s*([0-9]{1,19})\s*,\s*\{\s*([0-9,\s]*)\}\s*\)", re.ASCII)
_DONORS = re.compile(rf"\{{\s*(?:{_DONOR.pattern}\s*(?:,\s*(?=\())?)*+\}}", re.ASCII)


def _parse_donors(text: str) -> tuple[Donor, ...]:
    if not _DONORS.fullmatch(text):
        raise AttributeValueError("expected {(parameter, {parameter index}), …}")
    return tuple(Donor(int(number), _index(path)) for number, path in _DONOR.findall(text))


def _parse_names(text: str) -> tuple[str, ...]:
    """Names of computations or instructions: one, or a braced list."""
    if text[0] == "{":
        names = [name.strip() for name in text[1:-1].split(",")] if text[1:-1].strip() else []
    else:
        names = [text]
    names = [name.removeprefix("%") for name in names]
    if not all(map(_NAME.fullmatch, names)):
        raise AttributeValueError(f"expected a name, or names in braces, got {text[:60]!r}")
    return tuple(names)


_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-]*", re.ASCII)


def _text(text: str) -> str:
    return unescape(text) if text[0] == '"' else text


def _groups(text: str) -> tuple[tuple[int, ...], ...]:
    try:
        return parse_replica_groups(text)
    except ValueError as error:
        raise AttributeValueError(str(error)) from None


def _sharding(text: str) -> str:
    if text[0] != "{":
        raise AttributeValueError(f"expected a sharding in braces, got {text[:60]!r}")
    try:
        check_sharding(text)
    except ValueError as error:
        raise AttributeValueError(str(error)) from None
    return text


def _int_list(text: str) -> tuple[int, ...]:
    if not _INT_LIST.fullmatch(text):
        raise AttributeValueError(f"expected numbers in braces such as {{0,2}}, got {text[:60]!r}")
    inner = text[1:-1]
    return tuple(map(int, inner.split(","))) if inner.strip() else ()


def _pairs(text: str) -> tuple[tuple[int, int], ...]:
    value = _generic(text)
    if not isinstance(value, tuple) or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in value):
        raise AttributeValueError(f"expected pairs such as {{{{0,1}},{{1,0}}}}, got {text[:60]!r}")
    return value


def _bool(text: str) -> bool:
    if text not in ("true", "false"):
        raise AttributeValueError(f"expected true or false, got {text[:40]!r}")
    return text == "true"


def _float(text: str) -> float:
    if not _FLOAT.fullmatch(text):
        raise AttributeValueError(f"expected a number, got {text[:40]!r}")
    return float(text)


def _string(text: str) -> str:
    if text[0] != '"':
        raise AttributeValueError(f"expected a string in double quotes, got {text[:40]!r}")
    return unescape(text)


_INT_LISTS = """dimensions lhs_contracting_dims rhs_contracting_dims lhs_batch_dims rhs_batch_dims lhs_ragged_dims
    rhs_group_dims offset_dims collapsed_slice_dims start_index_map operand_batching_dims start_indices_batching_dims
    update_window_dims inserted_window_dims scatter_dims_to_operand_dims input_batching_dims
    scatter_indices_batching_dims fft_length dynamic_slice_sizes"""
_INTS = """index channel_id iota_dimension k feature_group_count batch_group_count index_vector_dim feature_index
    inferred_dimension delta exponent_bits mantissa_bits num_carries cross_program_prefetch_index replica_count
    num_partitions"""
_BOOLS = """is_stable constrain_layout use_global_device_ids is_host_transfer indices_are_sorted unique_indices
    custom_call_has_side_effect is_scheduled alias_passthrough_params is_reverse is_associative is_composite largest"""
_STRINGS = """custom_call_target infeed_config outfeed_config execution_thread async_execution_thread"""

_PARSERS: dict[str, Callable[[str], Any]] = {
    "window": _parse_window,
    "dim_labels": _parse_dim_labels,
    "slice": _parse_slice,
    "padding": _parse_padding,
    "metadata": _parse_metadata,
    "frontend_attributes": _parse_frontend_attributes,
    "input_output_alias": _parse_aliases,
    "buffer_donor": _parse_donors,
    "replica_groups": _groups,
    "source_target_pairs": _pairs,
    "epsilon": _float,
    "control-predecessors": _parse_names,
    "sharding": _sharding,
    "domain": _sharding,
    "backend_config": _text,
    "entry_computation_layout": _text,
    "literal": _text,
    **dict.fromkeys(_INT_LISTS.split(), _int_list),
    **dict.fromkeys(_INTS.split(), _parse_int),
    **dict.fromkeys(_BOOLS.split(), _bool),
    **dict.fromkeys(_STRINGS.split(), _string),
    **dict.fromkeys(COMPUTATION_ATTRIBUTES, _parse_names),
}


def parse_value(name: str, text: str) -> Any:
    """The value of attribute `name` with this text; AttributeValueError where the form is wrong."""
    parser = _PARSERS.get(name, _generic)
    return parser(text)
