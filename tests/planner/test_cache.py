"""The plan cache: what counts as the same question, and answers in the words of who asks."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardwright
from shardwright.clusters.cluster import Cluster, Link
from shardwright.hlo import parse
from shardwright.options.plan_options import PlanOptions
from shardwright.planner import PlanProgress, plan
from shardwright.planner.cache.keys import program_digest
from shardwright.planner.cache.plan_cache import plan_with_cache
from shardwright.planner.cache.relabel import ProgramNames, Relabeler, RelabelError, SourceLocation
from shardwright.planner.cache.store import FileStore, MemoryStore
from shardwright.planner.plans.verify import check_plan
from shardwright.plans.pipeline_plan import PipelinePlan
from shardwright.plans.plan import Plan
from shardwright.plans.plan_json import decode
from shardwright.plans.plan_text import plan_to_json
from shardwright.user_plans import to_user_plan
from tests.planner.clocks import just_late

CLUSTER = Cluster.local(8)


def step(params: Any, x: Any) -> Any:
    def loss(p: Any) -> Any:
        hidden = jnp.tanh(x @ p["up"])
        hidden = jnp.tanh(x @ p["up"]) + hidden
        return jnp.mean((hidden @ p["down"]) ** 2)

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda a, b: a - 0.1 * b, params, gradients), value


def text_of(function: Callable[..., Any] = step, width: int = 64, up: str = "up", batch: int = 32) -> str:
    params = {up: jnp.ones((width, 4 * width)), "down": jnp.ones((4 * width, width))}
    run = function if up == "up" else lambda p, x: function({"up": p[up], "down": p["down"]}, x)
    lowered = jax.jit(run, donate_argnums=0).lower(params, jnp.ones((batch, width)))
    return lowered.as_text("hlo", debug_info=True)


TEXT = text_of()


class CountingAsker:
    """Asks for plans.

    searches: answers whose progress was not the cache's alone.
    reports: the progress of the last one.
    """

    def __init__(self) -> None:
        self.searches = 0
        self.reports: list[PlanProgress] = []

    def __call__(
        self, text: str, cluster: Cluster = CLUSTER, options: PlanOptions | None = None, **more: Any
    ) -> Plan | PipelinePlan:
        self.reports = []
        answer = plan_with_cache(text, cluster, options, progress=self.reports.append, **more)
        self.searches += [report.phase for report in self.reports] != ["cache"]
        return answer


@pytest.fixture
def ask() -> CountingAsker:
    return CountingAsker()


def same_but_for_time(one: Plan, other: Plan) -> bool:
    bare = [replace(plan, planning_s=0, program_sha256="") for plan in (one, other)]  # the cache names programs
    return bare[0] == bare[1] and one.hlo_text == other.hlo_text


def move_lines(text: str, by: int = 7) -> str:
    """The text as if lines had been put in front of the function."""
    return re.sub(r"\b(line|end_line)=(\d+)", lambda match: f"{match[1]}={int(match[2]) + by}", text)


# ---- what is asked again ---------------------------------------------------------


def test_the_same_question_is_searched_once(ask: CountingAsker, tmp_path: Path) -> None:
    first = ask(TEXT, CLUSTER, store=FileStore(tmp_path))
    again = ask(TEXT, CLUSTER, store=FileStore(tmp_path))
    assert ask.searches == 1
    assert same_but_for_time(first, again)
    assert [report.phase for report in ask.reports] == ["cache"]
    assert isinstance(first, Plan)
    assert ask.reports[0].incumbent_s == first.cost.step_s


def test_without_a_store_everything_is_searched(ask: CountingAsker) -> None:
    for _ in range(2):
        ask(TEXT, CLUSTER, store=None)
    assert ask.searches == 2


@pytest.mark.dear
@pytest.mark.parametrize(
    "other",
    [
        lambda ask: ask(text=text_of(width=128)),
        lambda ask: ask(text=text_of(batch=64)),
        lambda ask: ask(text=TEXT.replace("tanh(", "sine(", 1)),
        lambda ask: ask(text=TEXT.replace("constant(0.1)", "constant(0.2)")),
        lambda ask: ask(TEXT, options=PlanOptions(mesh={"data": 8})),
        lambda ask: ask(TEXT, options=PlanOptions(force={"params*": {0: None}}, mesh={"data": 8})),
        lambda ask: ask(TEXT, cluster=Cluster.local(4)),
        lambda ask: ask(TEXT, cluster=replace(CLUSTER, intra_node=Link(bandwidth_bytes_per_s=1e9))),
        lambda ask: ask(TEXT, cluster=replace(CLUSTER, hardware="a100")),
    ],
)
def test_another_question_is_searched(ask: CountingAsker, other: Callable[[Callable[..., Any]], Any]) -> None:
    store = MemoryStore()
    ask(TEXT, store=store)
    other(partial(ask, store=store))
    assert ask.searches == 2


def test_where_a_cluster_is_and_who_may_connect_does_not_count(ask: CountingAsker) -> None:
    store = MemoryStore()
    elsewhere = replace(
        CLUSTER, name="elsewhere", token="secret", nodes=tuple(replace(n, ip="10.0.0.1", port=7) for n in CLUSTER.nodes)
    )
    for cluster in (CLUSTER, elsewhere):
        ask(TEXT, cluster, store=store)
    assert ask.searches == 1


@pytest.mark.dear
def test_plans_of_other_planners_are_not_found(tmp_path: Path) -> None:
    """A planner that differs by a comment, in a process of its own, searches again; the very same one does not."""
    script = (
        "import sys\nfrom pathlib import Path\nfrom shardwright.clusters.cluster import Cluster\n"
        "from shardwright.planner.cache.plan_cache import plan_with_cache\n"
        "from shardwright.planner.cache.store import FileStore\n"
        "text, store = Path(sys.argv[1]).read_text(), FileStore(Path(sys.argv[2]))\n"
        "plan_with_cache(text, Cluster.local(8), store=store, progress=lambda report: print(report.phase))\n"
    )
    (tmp_path / "step.hlo").write_text(TEXT)
    plan_with_cache(TEXT, CLUSTER, store=FileStore(tmp_path / "plans"))
    copy = tmp_path / "copy"
    shutil.copytree(
        Path(shardwright.__file__).parent, copy / "shardwright", ignore=shutil.ignore_patterns("__pycache__")
    )

    def phases() -> list[str]:
        command = [sys.executable, "-c", script, str(tmp_path / "step.hlo"), str(tmp_path / "plans")]
        environment = {**os.environ, "PYTHONPATH": str(copy)}
        return subprocess.run(
            command, capture_output=True, text=True, check=True, env=environment, cwd=tmp_path
        ).stdout.split()

    assert phases() == ["cache"]
    with (copy / "shardwright" / "planner" / "planning.py").open("a") as file:
        file.write("# another planner\n")
    assert "search" in phases()


def test_what_a_deadline_cut_short_is_searched_again(ask: CountingAsker) -> None:
    store = MemoryStore()
    for _ in range(2):
        ask(TEXT, CLUSTER, PlanOptions(deadline_s=1e-9), store=store, clock=just_late())
    assert ask.searches == 2


def test_damaged_entries_are_searched_again(ask: CountingAsker) -> None:
    store = MemoryStore()
    ask(TEXT, CLUSTER, store=store)
    for key in list(store._entries):
        store.put(key, b"damaged")
    ask(TEXT, CLUSTER, store=store)
    assert ask.searches == 2


# ---- the same program in other words -----------------------------------------------

#: Texts that differ from TEXT in names only.
RELABELLED = {
    "lines": move_lines(TEXT),
    "module": TEXT.replace("HloModule jit_step", "HloModule jit_train", 1),
    "argument": text_of(up="first"),
    "instructions": re.sub(r"\b(add|dot_general|tanh|multiply)\.(\d+)", r"\1.\g<2>77", TEXT),
    "function": TEXT.replace("jit(step)/", "jit(train)/"),
}


@pytest.mark.dear
@pytest.mark.parametrize("name", RELABELLED)
def test_answers_come_in_the_words_of_who_asks(name: str, ask: CountingAsker) -> None:
    """As though the program had been planned itself: the oracle is the planner, asked directly."""
    text, store = RELABELLED[name], MemoryStore()
    assert text != TEXT
    ask(TEXT, CLUSTER, store=store)
    answer = ask(text, CLUSTER, store=store)
    assert ask.searches == 1
    expected = plan(text, CLUSTER)
    assert same_but_for_time(answer, expected)
    check_plan(parse(answer.require_hlo()), answer)


def test_other_scopes_are_planned_anew_for_segments_are_called_by_them(ask: CountingAsker) -> None:
    text, store = TEXT.replace("jvp()", "jvp(model)"), MemoryStore()
    ask(TEXT, CLUSTER, store=store)
    answer = ask(text, CLUSTER, store=store)
    assert ask.searches == 2
    assert answer.segments[0].name.startswith("segment 0, model")


def test_a_program_without_source_lines_is_searched_for_its_own_words(ask: CountingAsker) -> None:
    store = MemoryStore()
    ask(TEXT, CLUSTER, store=store)
    text = re.sub(r", metadata=\{[^{}]*\}", "", TEXT)
    again, anew = ask(text, CLUSTER, store=store), plan(text, CLUSTER)
    assert isinstance(again, Plan)  # it follows the first search's record, and says so
    assert again.cost.lower_bound_s == pytest.approx(anew.cost.lower_bound_s, rel=1e-12)  # the terms in another order
    again = replace(again, cost=replace(again.cost, lower_bound_s=anew.cost.lower_bound_s))
    assert same_but_for_time(replace(again, candidates=(), notes=()), replace(anew, candidates=(), notes=()))
    assert ask.searches == 2


def looped(params: Any, x: Any) -> Any:
    """A step with functions that are called more than once, a loop and a conditional."""
    smooth = jax.jit(lambda y: jnp.tanh(y) * 0.5)

    def loss(p: Any) -> Any:
        hidden = jax.lax.fori_loop(0, 3, lambda i, y: smooth(y @ p["up"]) @ p["down"], smooth(x))
        return jnp.mean(jax.lax.cond(hidden[0, 0] > 0, smooth, jnp.sin, hidden) ** 2)

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda a, b: a - 0.1 * b, params, gradients), value


@pytest.mark.dear
@pytest.mark.parametrize("change", ["same", "lines", "argument", "instructions"])
def test_rewritten_programs_come_in_the_words_of_who_asks(change: str, ask: CountingAsker) -> None:
    """The planner writes calls out in place: what is kept is another program than what was asked for."""
    text, store = text_of(looped), MemoryStore()
    other = {
        "same": text,
        "lines": move_lines(text),
        "argument": text_of(looped, up="first"),
        "instructions": re.sub(r"\b(mul|tanh)\.(\d+)", r"\1.\g<2>77", text),
    }[change]
    first = ask(text, CLUSTER, store=store)
    answer = ask(other, CLUSTER, store=store)
    assert ask.searches == 1
    assert first.original_sha256
    assert decode(plan_to_json(answer)) == answer
    check_plan(parse(answer.require_hlo()), answer)
    if change != "instructions":  # further copies of a function are numbered by what is free
        assert same_but_for_time(answer, plan(other, CLUSTER))


def test_names_that_are_given_are_the_ones_reported(ask: CountingAsker) -> None:
    store = MemoryStore()
    ask(TEXT, CLUSTER, store=store)
    options = PlanOptions(argument_names=("a", "b", "c"), output_names=("d", "e", "f"))
    answer = ask(TEXT, CLUSTER, options, store=store)
    assert [variable.name for variable in answer.parameters] == ["a", "b", "c"]
    assert same_but_for_time(answer, plan(TEXT, CLUSTER, options))


def test_one_line_that_became_two_is_not_guessed() -> None:
    """What a sentence names must be one thing, and no common word."""
    places = tuple(SourceLocation(f"stack_frame_id={i}", "jit(f)/mul", f"model.py:{i}") for i in range(3))

    def labels(*place_of: int, names: tuple[str, ...] = ("dot", "add.2", "sum")) -> ProgramNames:
        return ProgramNames(module="m", computations=("main",), instructions=names, place_of=place_of, places=places,
                      arguments=("p['a']",), outputs=())  # fmt: skip

    moved = Relabeler(labels(0, 0, 1), labels(1, 1, 2))
    assert moved.relabel_text("result of matmul (model.py:0), p['a']") == "result of matmul (model.py:1), p['a']"
    split = Relabeler(labels(0, 0, 1), labels(0, 1, 1))
    assert split.relabel_text("matmul (model.py:1)") == "matmul (model.py:1)"
    with pytest.raises(RelabelError):
        split.relabel_text("matmul (model.py:0)")
    renamed = Relabeler(labels(0, 0, 1), labels(0, 0, 1, names=("product", "add.3", "sum")))
    assert renamed.relabel_text("the sum add.2.") == "the sum add.3."
    with pytest.raises(RelabelError):
        renamed.relabel_text("a dot of two")


# ---- keys --------------------------------------------------------------------------


def test_the_digest_sees_operands_shapes_attributes_and_roots() -> None:
    text = """HloModule m, entry_computation_layout={(f32[4,4], f32[4,4])->f32[4,4]}

ENTRY main {
  a = f32[4,4] parameter(0)
  b = f32[4,4] parameter(1)
  c = f32[4,4] subtract(a, b)
  d = f32[4,4] transpose(a), dimensions={1,0}
  ROOT e = f32[4,4] add(c, d)
}
"""
    changes = (
        ("subtract(a, b)", "subtract(b, a)"),
        ("dimensions={1,0}", "dimensions={0,1}"),
        ("transpose(a)", "transpose(c)"),
        ("add(c, d)", "multiply(c, d)"),
        ("  ROOT e = f32[4,4] add(c, d)", "  e = f32[4,4] add(c, d)\n  ROOT f = f32[4,4] tanh(d)"),
        ("f32[4,4] transpose", "f32[4,4]{0,1} transpose"),
    )
    seen = {program_digest(parse(text.replace(before, after))) for before, after in changes}
    assert len(seen | {program_digest(parse(text))}) == 1 + len(changes)
    renamed = text.replace(" c =", " zebra =").replace("(c, d)", "(zebra, d)").replace("HloModule m", "HloModule n")
    assert program_digest(parse(renamed)) == program_digest(parse(text))


def test_pipelines_are_kept(tmp_path: Path) -> None:
    """The very same text is answered by the same pipeline, at once and without a search; other questions are not."""
    store, text = FileStore(tmp_path), TEXT
    options = PlanOptions(stages=2, micro_batches=2)
    told: list[PlanProgress] = []
    result = plan_with_cache(text, CLUSTER, options, store=store, progress=told.append)
    phases: list[str] = []
    begin_s = time.process_time()
    again = plan_with_cache(text, CLUSTER, options, store=store, progress=lambda report: phases.append(report.phase))
    elapsed_s = time.process_time() - begin_s
    assert isinstance(again, PipelinePlan)
    assert phases == ["cache"]
    assert replace(again, planning_s=result.planning_s) == result
    assert again.require_hlo() == text
    assert to_user_plan(again).emit() == to_user_plan(result).emit()
    assert elapsed_s < 1.0
    last_s = {report.phase: report.elapsed_s for report in told}
    assert result.planning_s > last_s["stages"] + last_s["programs"]  # both parts, each timed from its own beginning
    for other in (replace(options, micro_batches=4), replace(options, schedule="gpipe")):
        phases.clear()
        plan_with_cache(text, CLUSTER, other, store=store, progress=lambda report: phases.append(report.phase))
        assert "stages" in phases
    renamed = text_of(up="upper")
    assert program_digest(parse(renamed)) == program_digest(parse(text))
    step_plan = plan_with_cache(renamed, CLUSTER, options, store=store)
    assert isinstance(step_plan, PipelinePlan)
    assert any("upper" in entry.variable.name for entry in step_plan.arguments)
