"""Which outputs of a lowered function take the memory of arguments: what the first line of its text says."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from shardwright.client.array_specs import ArrayType
from shardwright.hlo.donation import pair_donors

_ALIASES, _DONORS = "input_output_alias={", "buffer_donor={"
_ALIAS = re.compile(r"\{\s*(\d*)\s*\}:\s*\((\d+),[^)]*\)")
_DONOR = re.compile(r"\((\d+),[^)]*\)")


def aliases_of(text: str, arguments: Sequence[ArrayType], outputs: Sequence[ArrayType]) -> dict[int, int]:
    """Output number → parameter number, from `input_output_alias={ {0}: (1, {}, may-alias) }`; donors in
    `buffer_donor={ (0, {}) }` are paired like in the planner.

    outputs: those that may be paired, the first ones of the text's.
    """
    header = text[: text.index("\n")]
    pairs = {int(output or 0): int(parameter) for output, parameter in _ALIAS.findall(_value(header, _ALIASES))}
    aliases = {output: parameter for output, parameter in pairs.items() if output < len(outputs)}
    donors = map(int, _DONOR.findall(_value(header, _DONORS)))
    argument_types, output_types = (
        [(array.element_type, array.shape) for array in types] for types in (arguments, outputs)
    )
    return aliases | pair_donors(donors, argument_types, output_types, aliases)


def without_other_pairs(text: str, aliases: Mapping[int, int]) -> str:
    """The text with these aliases, and without donors but theirs: JAX pairs donated arguments with outputs of their
    types, were they read by `jax.debug` alone.
    """
    header, _, rest = text.partition("\n")
    for name, entry, numbers in ((_ALIASES, _ALIAS, aliases.keys()), (_DONORS, _DONOR, aliases.values())):
        value = _value(header, name)
        entries = [match[0] for match in entry.finditer(value) if int(match[1] or 0) in numbers]
        if value:
            attribute = f", {value[: value.rindex('}') + 1]}"
            header = header.replace(attribute, f", {name} {', '.join(entries)} }}" if entries else "", 1)
    return f"{header}\n{rest}"


def _value(header: str, name: str) -> str:
    """The value of one attribute, up to the next attribute; '' if absent."""
    start = header.find(name)
    return header[start : header.find("=", start + len(name))] if start >= 0 else ""
