"""From an instruction back to the user's line."""

from __future__ import annotations

import inspect

import jax
import jax.numpy as jnp
import pytest

from shardwright.errors import HloSyntaxError
from shardwright.hlo import SourceLocation, locate, parse, stack
from shardwright.hlo.source import is_library

TABLES = """
FileNames
1 "/home/u/train.py"
2 "/venv/lib/python3.11/site-packages/flax/linear.py"

FunctionNames
1 "step"
2 "Dense.__call__"

FileLocations
1 {file_name_id=1 function_name_id=1 line=10 end_line=10 column=1 end_column=9}
2 {file_name_id=2 function_name_id=2 line=99 end_line=99 column=1 end_column=9}

StackFrames
1 {file_location_id=1 parent_frame_id=PARENT1}
2 {file_location_id=2 parent_frame_id=PARENT2}

"""
STEP = SourceLocation("/home/u/train.py", 10, "step")
DENSE = SourceLocation("/venv/lib/python3.11/site-packages/flax/linear.py", 99, "Dense.__call__")


def text(metadata: str, tables: str = "") -> str:
    return f"HloModule m\n{tables}\nENTRY e {{ ROOT p = f32[] parameter(0), metadata={{{metadata}}} }}\n"


@pytest.mark.parametrize(("first", "second"), [(1, 2), (0, 1)], ids=["as XLA prints parents", "as they are"])
def test_innermost_line_of_the_user(first: int, second: int) -> None:
    tables = TABLES.replace("PARENT1", str(first)).replace("PARENT2", str(second))
    module = parse(text("stack_frame_id=2", tables))
    assert stack(module, module.entry.root) == (DENSE, STEP)
    assert locate(module, module.entry.root) == STEP == module.source(module.entry.root)
    assert str(STEP) == "/home/u/train.py:10 (step)"


def test_a_library_where_nothing_else_is_known() -> None:
    tables = TABLES.replace("PARENT1", "1").replace("PARENT2", "1")
    module = parse(text("stack_frame_id=2", tables))
    assert locate(module, module.entry.root) == DENSE
    named = parse(text('op_name="jit(step)/Dense_0/dot_general" stack_frame_id=2', tables))
    assert locate(named, named.entry.root) is None
    assert named.place(named.entry.root) == "jit(step)/Dense_0/dot_general"


LIBRARIES = [
    "/venv/lib/python3.11/site-packages/flax/linen/linear.py", "/usr/lib/python3/dist-packages/torch/nn/functional.py",
    "site-packages/optax/_src/transform.py", "/usr/lib/python3.12/contextlib.py", "/opt/pypy/lib/pypy3.10/runpy.py",
    "C:\\Python311\\Lib\\functools.py", r"C:\env\Lib\site-packages\jax\_src\lax\lax.py",
    "<frozen importlib._bootstrap>", "<string>", "<__array_function__ internals>",
    "/build/bazel/tensorflow/python/framework/ops.py", "/home/u/src/jax/jax/_src/numpy/lax_numpy.py",
    "/root/.pyenv/versions/3.11.7/lib/python3.11/functools.py", "/conda/lib/python3.9/site-packages/mine/model.py",
]  # fmt: skip
OWN = [
    "/home/u/train.py", "model.py", "<stdin>", "<ipython-input-3-a1b2>", "/tmp/ipykernel_7/12.py", "/home/u/lib/nn.py",
    "/home/u/flax_examples/train.py", "/home/u/projects/torch/model.py", "C:\\work\\keras\\fit.py",
    "/home/u/python3/tools.py",
]  # fmt: skip


def test_files_of_libraries_and_of_the_user() -> None:
    assert [file for file in LIBRARIES if not is_library(file)] == []
    assert [file for file in OWN if is_library(file)] == []


def test_a_place_is_the_users_line_or_the_op_name() -> None:
    def place(metadata: str) -> str:
        module = parse(text(metadata))
        return module.place(module.entry.root)

    ops = 'source_file="/x/site-packages/tensorflow/python/framework/ops.py" source_line=1221'
    assert place(f'op_name="dense/MatMul" {ops}') == "dense/MatMul"
    assert place('op_name="dense/MatMul" source_file="/home/u/net.py" source_line=4') == "net.py:4"
    assert place('op_type="x"') == ""


def test_circles_end() -> None:
    tables = TABLES.replace("PARENT1", "3").replace("PARENT2", "2")
    module = parse(text("stack_frame_id=2", tables))
    assert len(stack(module, module.entry.root)) == 2


def test_older_metadata() -> None:
    module = parse(text('source_file="a.py" source_line=3'))
    assert locate(module, module.entry.root) == SourceLocation("a.py", 3, "")


def test_nothing_known() -> None:
    module = parse(text('op_name="x"'))
    assert locate(module, module.entry.root) is None
    assert stack(module, module.entry.root) == ()


@pytest.mark.parametrize("metadata", ["stack_frame_id=3", 'stack_frame_id="1"', "op_name=5", "stack_frame_id=-1"])
def test_wrong_metadata(metadata: str) -> None:
    tables = TABLES.replace("PARENT1", "1").replace("PARENT2", "2")
    with pytest.raises(HloSyntaxError, match=r"stack_frame_id|op_name"):
        parse(text(metadata, tables))


def test_lines_of_a_real_function() -> None:
    def inner(x: jax.Array) -> jax.Array:
        return jnp.sin(x)

    def outer(x: jax.Array) -> jax.Array:
        return inner(x) * 2

    lowered = jax.jit(outer).lower(jax.ShapeDtypeStruct((3,), jnp.float32)).as_text("hlo", debug_info=True)
    module = parse(lowered)
    sine = next(instruction for instruction in module.instructions() if instruction.opcode == "sine")
    lines, first = inspect.getsourcelines(inner)
    place = locate(module, sine)
    assert place is not None
    assert (place.file, place.line) == (__file__, first + len(lines) - 1)
    assert place.function.endswith("inner")
    assert [frame.function.rsplit(".", 1)[-1] for frame in stack(module, sine)][:2] == ["inner", "outer"]
