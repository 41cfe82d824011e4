"""Passes of XLA that decide which values a program stores, and for how long: what a profile's compiler runs.

In a profile's file they are a list, in XLA's order, each with its source; why others do not run stands beside it:

    [compiler]
    passes = [
        { name = "folds_transposes", source = "transpose_folding.cc in XLA:GPU's pipeline" },
    ]

    [compiler.without]
    copies_donated = "assumed, not verified on a GPU"

Files of before, with a key of true or false for each pass (`folds_transposes = { value = true, source = "…" }`), are
read as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

#: In the order of XLA's pipelines; the comment beside a name says which of its passes does it.
Pass = Literal[
    # HloCSE: equal values are merged before partitioning (`cost.peak.cse`)
    "merges_before_partitioning",
    # ScatterExpander: a scatter of one element into each row of zeros compares indices elementwise, storing no
    # temporaries
    "scatters_compare",
    # SelectAndScatterExpander: select-and-scatter becomes index arrays of all elements, a windowed reduction of them,
    # and a scatter
    "expands_select_and_scatter",
    # AlgebraicSimplifier: division by a broadcast divisor becomes multiplication by the broadcast inverse
    "inverts_divisors",
    # AllToAllDecomposer: kernels cut the pieces before an all-to-all and concatenate the received ones after it
    "splits_all_to_alls",
    # ReduceScatterCreator: an all-reduce followed by a slice per device becomes a reduce-scatter, storing only that
    # slice
    "creates_reduce_scatters",
    # FloatNormalization: bfloat16 is computed, sliced, gathered and sent in float32 and converted back
    "computes_bf16_in_f32",
    # BFloat16Propagation: float32 values with only products for readers are stored and sent in bfloat16
    "products_read_bf16",
    # DotDecomposer: a product's operand is copied unless its contracted dimensions are adjacent, in the position its
    # kernel expects; likewise a convolution's operands and result, if their dimensions are in another order
    "copies_dot_operands",
    # TransposeFolding: products read a transposed matrix in its original order
    "folds_transposes",
    # LayoutAssignment: convolutions read the program's arguments from copies with channels ahead of space, shared by
    # forward and backward pass
    "turns_convolved",
    # … arguments that are elementwise with a transposed product are copied into its layout
    "turns_arguments",
    # … collectives along inner dimensions make that dimension outermost in memory, causing transposes in the kernels
    # around them (`cost.moves.relayout`)
    "turns_moved",
    # … products read a copy of an operand gathered along an inner dimension: an all-gather makes that dimension
    # outermost
    "copies_gathered",
    # … a reshape of the innermost dimension is a separate copying kernel
    "copies_relayouts",
    # InstructionFusion: matrix products and convolutions fuse elementwise operands, and an elementwise instruction that
    # is the only reader of their result
    "products_take_in",
    # … a cheap value, stored because of one reader, is recomputed in its other readers' kernels
    "repeats_cheap",
    # … which includes slow elementwise functions such as tanh
    "repeats_expensive",
    # … and quotients and exponentials
    "repeats_quotients",
    # MultiOutputFusion: loops and reductions over the same arrays form one kernel, with memory traffic only at its
    # inputs and outputs (`planner.costs.traffic`); without it each pays `fused_traffic`
    "merges_loops",
    # AllReduceCombiner: matching all-reduces of any size run together (`cost.peak.all_reduce_combiner`)
    "merges_all_reduces",
    # CopyInsertion: a donated argument is copied at the start of the step, unless dependencies order all its other
    # readers before the write
    "copies_donated",
    # … a value written over an argument first gets its own buffer, if its kernel reads inputs in another order
    "copies_turned",
    # BufferAssignment: a donated argument's memory is reused between its last reader and the write
    "fills_donated",
    # … an all-reduce writes its result over its operand
    "reduces_in_place",
    # the last check: programs get at most the profile's `memory_bytes`, whatever a cluster file or an option says
    "caps_memory",
]

PASSES: tuple[Pass, ...] = get_args(Pass)


def read_passes(compiler: Mapping[str, Any]) -> tuple[tuple[Pass, ...], dict[str, str]]:
    """The passes that a profile's compiler runs, in XLA's order, and the source of each pass that runs or does not.

    Raises ValueError where the table `compiler` of the file is none of the two formats; KeyError where a key of before
    is missing.
    """
    by_key = [name for name in PASSES if name in compiler]
    if "passes" not in compiler:
        if not by_key:
            raise ValueError("compiler.passes is missing: list the passes that its compiler runs, each with its source")
        passes = tuple(name for name in PASSES if compiler[name]["value"])
        return passes, _check_sources({name: compiler[name]["source"] for name in PASSES})
    if by_key:
        raise ValueError(f"compiler.{by_key[0]} stands beside compiler.passes: write it as an entry of that list")
    names = [entry["name"] for entry in compiler["passes"]]
    without = dict(compiler.get("without", {}))
    for name in (*names, *without):
        if name not in PASSES:
            raise ValueError(f"{name!r} of compiler.passes is no pass; write some of {', '.join(PASSES)}")
        if names.count(name) + (name in without) > 1:
            raise ValueError(f"the pass {name!r} is listed twice in compiler.passes and compiler.without")
    sources = {entry["name"]: entry["source"] for entry in compiler["passes"]} | without
    return tuple(name for name in PASSES if name in names), _check_sources(sources)


def _check_sources(sources: Mapping[str, str]) -> dict[str, str]:
    if bare := [name for name, source in sources.items() if not source]:
        raise ValueError(f"the pass {bare[0]!r} has no source")
    return dict(sources)
