"""Arguments donated without a named output: `buffer_donor={ (0, {}) }` in a module's header.

JAX writes `input_output_alias` if it can pair a donated argument with an output itself, and `buffer_donor` if the
pairing is left to the compiler, e.g. with `in_shardings` and no `out_shardings`. XLA then gives the argument's memory
to an output of the same size (`OptimizeInputOutputBufferAlias`). Pairing by type, each output once, predicts it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence


def pair_donors(
    donors: Iterable[int], arguments: Sequence[Hashable], outputs: Sequence[Hashable], aliases: Mapping[int, int]
) -> dict[int, int]:
    """Output → donated argument of the same type, both by flat number.

    arguments, outputs: their types. aliases: output → argument, as paired already; neither is paired again.
    """
    free: dict[Hashable, list[int]] = {}
    for number in reversed(range(len(outputs))):
        if number not in aliases:
            free.setdefault(outputs[number], []).append(number)
    donor_of_output = {}
    for donor in sorted(set(donors) - set(aliases.values())):
        candidates = free.get(arguments[donor])
        if candidates:
            donor_of_output[candidates.pop()] = donor
    return donor_of_output
