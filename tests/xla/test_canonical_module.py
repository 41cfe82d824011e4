"""Many programs at once: twins are compiled once, the rest by several children."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from shardwright.errors import CompilationAbortedError, PlanError
from shardwright.plans.plan import Plan
from shardwright.xla import CompileJob, CompileService
from shardwright.xla.canonical_module import CanonicalModule
from shardwright.xla.service import _count_at_once
from tests.xla.hand import entry, lower, names_of, plan, sharding

X = np.zeros((16, 32), np.float32)


def plan_contraction(hlo: str) -> Plan:
    """Its only dot split along what it contracts: one all-reduce."""
    (dot,) = names_of(hlo, "dot")
    split = [sharding((None, "x")), sharding(("x", None))]
    return plan(
        hlo,
        {"x": 4, "y": 2},
        {0: (None, "x"), 1: ("x", None)},
        {},
        [entry(dot, split, sharding((None, None)), ("x",), opcode="dot")],
    )


def rename(hlo: str, name: str) -> str:
    """The same program, its dot and its module under other names."""
    (dot,) = names_of(hlo, "dot")
    return hlo.replace(dot, name).replace("HloModule jit_", "HloModule of_another_stage_")


def jobs_of(*texts: str) -> list[CompileJob]:
    """Jobs whose texts are long enough for a child each."""
    texts = tuple(text + "\n" * 200_000 for text in texts)
    return [CompileJob(name=f"program {n}", hlo_text=text, plan=plan_contraction(text)) for n, text in enumerate(texts)]


HLO = lower(lambda x, w: x @ w, X, X.T)
TWIN = rename(HLO, "dot.77")
OTHER = lower(lambda x, w: 2 * (x @ w), X, X.T)


@pytest.fixture(scope="module")
def service():
    with CompileService(8, children=2) as service:
        yield service


def test_twins_are_compiled_once_and_keep_their_own_names(service):
    first, twin, other = service.compile_all(jobs_of(HLO, TWIN, OTHER))
    assert twin.serialized is first.serialized
    assert other.serialized != first.serialized
    assert [each.collectives[0].op_name for each in (first, twin)] == [names_of(HLO, "dot")[0], "dot.77"]
    assert "dot.77" in twin.stablehlo
    assert twin.memory == first.memory
    assert "all-reduce" in twin.partitioned
    assert service.compile(TWIN, plan_contraction(TWIN)).collectives == twin.collectives


def test_what_differs_is_no_twin():
    """Other constants, other targets of calls; names that a module defines itself do not matter."""
    module = 'module @{m} {{ func.func @main() {{ stablehlo.custom_call @{call}() : () -> () loc("{at}") }} }}'
    first = CanonicalModule.of(module.format(m="a", call="solve", at="x.1"))
    assert CanonicalModule.of(module.format(m="b", call="solve", at="x.2")).text == first.text
    assert CanonicalModule.of(module.format(m="a", call="invert", at="x.1")).text != first.text
    twice = 'loc("{}") loc("{}")'
    assert CanonicalModule.of(twice.format("a", "b")).text == CanonicalModule.of(twice.format("b", "a")).text
    assert CanonicalModule.of(twice.format("a", "a")).text != CanonicalModule.of(twice.format("a", "b")).text


@pytest.mark.dear
def test_children_have_the_devices_that_the_programs_need_and_one_is_kept(service):
    service.compile_all(jobs_of(HLO, OTHER))
    (result,) = service._idle
    assert result.device_count == 8
    with CompileService(512) as large:
        large.compile(HLO, plan_contraction(HLO))
        assert [child.device_count for child in large._idle] == [8]


def test_programs_that_were_compiled_at_once_leave_one_child(service):
    """Two sessions, say."""
    with ThreadPoolExecutor(2) as pool:
        items = list(pool.map(lambda text: service.compile(text, plan_contraction(text)), (HLO, OTHER)))
    assert all(each.serialized for each in items)
    assert len(service._idle) == 1


def test_an_error_names_the_program(service):
    absent = plan(HLO, {"x": 8}, entries=[entry("gone.1", [], sharding(()))])
    broken = CompileJob(name="forward.3 of stage 1", hlo_text=HLO, plan=absent)
    with pytest.raises(PlanError, match="is not in the program") as caught:
        service.compile_all([*jobs_of(OTHER), broken])
    assert caught.value.where.startswith("forward.3 of stage 1")


def test_closing_ends_a_compilation_under_way(service):
    """A server that stops does not wait for XLA."""
    with ThreadPoolExecutor(1) as pool:
        compilation = pool.submit(service.compile, HLO, plan_contraction(HLO))
        while not service._busy:
            time.sleep(1e-4)
        (child,) = service._busy
        service.close()
        with pytest.raises(CompilationAbortedError):
            compilation.result()
    assert not child.is_alive
    assert service.compile(HLO, plan_contraction(HLO)).serialized is not None


def test_programs_compile_together_only_where_memory_allows():
    assert _count_at_once([1 << 20, 1 << 20, 1 << 20], 8, available_bytes=8 << 30) == 2
    assert _count_at_once([200_000] * 20, 8, available_bytes=8 << 30) == 8
    assert _count_at_once([8 << 20, 1000], 8, available_bytes=8 << 30) == 1


def test_few_small_programs_are_not_worth_a_second_child():
    assert _count_at_once([1000] * 20, 8, available_bytes=8 << 30) == 1
