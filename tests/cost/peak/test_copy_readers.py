"""For which instruction a copy is made, and what that takes as the instruction uses it."""

from __future__ import annotations

import pytest

from shardwright.cost.peak.copy_readers import CopyReader, operand_copy_bytes, reader_of
from shardwright.cost.peak.inline import inline_calls
from shardwright.cost.peak.liveness import liveness
from shardwright.cost.peak.lowering import Lowering
from shardwright.cost.peak.memory import predict_memory_and_peak
from shardwright.cost.profiles import hardware_profile
from shardwright.hlo import Instruction, Module, parse
from shardwright.plans.plan import InstructionPlan
from shardwright.plans.shardings import Mesh, TensorSharding

MESH = Mesh.of({"x": 4})
WHOLE, ROWS = TensorSharding.replicated(2), TensorSharding((("x",), ()))

#: The gradient of a weight: both leading dimensions of what is made are contracted, the last one comes first in the
#: kernel's operand.
TURNING = """HloModule turning

ENTRY main {
  x = f32[8,16,32]{2,1,0} parameter(0)
  y = f32[8,16,64]{2,1,0} parameter(1)
  w = f32[64,32]{1,0} parameter(2)
  made = f32[8,16,64]{2,1,0} tanh(y)
  back = f32[8,16,32]{2,1,0} dot(made, w), lhs_contracting_dims={2}, rhs_contracting_dims={0}
  gradient = f32[64,32]{1,0} dot(made, x), lhs_contracting_dims={0,1}, rhs_contracting_dims={0,1}
  ROOT out = (f32[8,16,32]{2,1,0}, f32[64,32]{1,0}) tuple(back, gradient)
}
"""

GATHERING = """HloModule gathering

ENTRY main {
  x = f32[64,64]{1,0} parameter(0)
  made = f32[64,64]{1,0} dot(x, x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT out = f32[64,64]{1,0} dot(made, made), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""


def instruction(module: Module, name: str) -> Instruction:
    return next(each for each in module.entry.instructions if each.name == name)


def split_by_rows(module: Module, gathered: str) -> list[InstructionPlan]:
    """Everything split along the rows, but for the second operand of one product."""
    plans = []
    for each in module.entry.instructions:
        used = tuple((WHOLE if each.name == gathered and i else ROWS,) for i, _ in enumerate(each.operands))
        plans.append(
            InstructionPlan(name=each.name, computation="main", opcode=each.opcode, operands=used, result=(ROWS,))
        )
    return plans


def test_what_a_product_turns_is_its_own() -> None:
    result = liveness(parse(TURNING))
    turned = {(name, reader) for name, reader in zip(result.names, result.readers, strict=True) if reader is not None}
    assert ("made", CopyReader("gradient", 0, is_transposed=True)) in turned
    assert None in {reader for name, reader in zip(result.names, result.readers, strict=True) if name == "made"}


def test_a_gathered_operand_is_its_readers() -> None:
    module = parse(GATHERING)
    plans = split_by_rows(module, gathered="out")
    held = predict_memory_and_peak(module, plans, (), (), MESH).held
    assert {(each.name, each.size_bytes, each.reader) for each in held} == {
        ("made", 64 * 64, None),
        ("made", 64 * 64 * 4, CopyReader("out", 1, is_transposed=False)),
    }


def test_what_is_moved_twice_is_for_the_reader_of_the_last_move() -> None:
    module = parse(GATHERING)
    plans = {each.name: each for each in split_by_rows(module, gathered="out")}
    program = Lowering(MESH, plans, hardware_profile("cpu")).program(inline_calls(module.entry))
    users = program.users()
    (gather,) = (node for node, opcode in enumerate(program.opcodes) if opcode == "all-gather" and users[node])
    (result,) = program.operands[gather]
    first = program.add("all-to-all", program.instructions[result], (result,), program.sizes_bytes[result], 64 * 16)
    program.operands[gather] = (first,)
    users = program.users()
    assert reader_of(program, users, first) is None
    assert reader_of(program, users, gather) is not None


@pytest.mark.parametrize(
    ("dims", "size"),
    [
        (((), (), ()), 8 * 16 * 64 * 4),
        ((("x",), (), ()), 8 * 16 * 64),
        (((), (), ("x",)), 8 * 16 * 64),
    ],
)
def test_a_turned_copy_takes_what_its_product_uses(dims: tuple[tuple[str, ...], ...], size: int) -> None:
    gradient = instruction(parse(TURNING), "gradient")
    used = (TensorSharding(dims), TensorSharding((dims[0], dims[1], ())))
    assert operand_copy_bytes(gradient, 0, used, MESH) == size


def test_what_has_nothing_to_be_turned_takes_nothing() -> None:
    """One element of the last dimension on each device: the others come first as it is."""
    gradient = instruction(parse(TURNING), "gradient")
    mesh = Mesh.of({"x": 64})
    used = (TensorSharding(((), (), ("x",))), TensorSharding.replicated(3))
    assert operand_copy_bytes(gradient, 0, used, mesh) == 0
