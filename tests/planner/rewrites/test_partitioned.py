"""What XLA's partitioner makes of a program before and after the rewrite, its variables split as Megatron-LM does."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from shardwright.hlo import Module, parse
from shardwright.hlo.entry import flat_aliases
from shardwright.planner.rewrites import rewrite
from shardwright.xla import private
from tests.planner.programs import gpt2, lower

#: Dimension, from the end, that is split over the tensor axis: column-parallel, then row-parallel.
SPLIT = {"qkv____w": 1, "qkv____b": 1, "proj____w": 2, "fc____w": 1, "fc____b": 1, "out____w": 2}
DEVICES = 4

_COLLECTIVE = re.compile(r" (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")


def collectives(module: Module) -> Counter[str]:
    """Kinds of the collectives that XLA inserts, Shardy propagating from arguments and outputs only."""
    devices = private.local_devices()[:DEVICES]
    overrides = [("xla_disable_hlo_passes", "cpu-all-reduce-combiner")]
    options = private.compile_options([device.id for device in devices], overrides=overrides)
    executable = private.compile_and_load(annotated(module), devices, options)
    return Counter(_COLLECTIVE.findall(private.hlo_of_executable(executable)))


def annotated(module: Module) -> str:
    """StableHLO with the sharding of every variable."""
    shardings = [sharding(p.name, p.shape.leaves[0].rank) for p in module.entry.parameters]
    aliases = flat_aliases(module)
    outputs = range(len(module.entry.root.shape.leaves))
    with private.mlir_context():
        ir = private.ir()
        converted = private.parse_module(private.stablehlo_of(module.to_text()))
        mesh = ir.Operation.parse(f'sdy.mesh @by_hand = <["model"={DEVICES}]>')
        ir.InsertionPoint.at_block_begin(converted.body).insert(mesh)
        main = next(op for op in converted.body.operations if str(op.attributes["sym_name"]) == '"main"')

        def attributes(texts: list[str]) -> object:
            return ir.ArrayAttr.get(
                [ir.Attribute.parse(f"{{sdy.sharding = #sdy.sharding<@by_hand, {t}>}}") for t in texts]
            )

        main.attributes["arg_attrs"] = attributes(shardings)
        main.attributes["res_attrs"] = attributes([shardings[aliases[n]] if n in aliases else "[]" for n in outputs])
        return str(converted)


def sharding(name: str, rank: int) -> str:
    from_end = next((at for part, at in SPLIT.items() if part in name), 0)
    return "[" + ", ".join('{"model"}' if rank - dim == from_end else "{}" for dim in range(rank)) + "]"


@pytest.mark.dear
def test_fused_qkv_needs_no_resharding_once_it_is_rewritten() -> None:
    module = parse(lower(gpt2()))
    before, after = collectives(module), collectives(rewrite(module).module)
    assert before.keys() > {"all-reduce"}  # XLA moves columns of q, k and v between devices
    assert after.keys() == {"all-reduce"}
    assert after["all-reduce"] <= before["all-reduce"]
