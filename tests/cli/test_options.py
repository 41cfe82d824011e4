"""What the command line's own notations mean, and what it says to those that mean nothing."""

from __future__ import annotations

import argparse

import pytest

from shardwright.cli.lower import arguments_of, example_of, load_function
from shardwright.cli.options import add_planning_options, cluster_of, force_of, planning_options
from shardwright.clusters.module_names import is_allowed
from shardwright.errors import ClusterConfigError, OptionError
from shardwright.options.plan_options import PlanOptions
from shardwright.server.options import add_server_options, to_arguments


def parse_options(*arguments: str) -> PlanOptions:
    parser = argparse.ArgumentParser()
    add_planning_options(parser)
    return planning_options(parser.parse_args(arguments))[1]


def test_mesh_notations() -> None:
    assert parse_options().mesh is None
    assert parse_options("--mesh=8").mesh == {"data": 8}
    assert parse_options("--mesh=2x4").mesh == {"data": 2, "model": 4}
    assert parse_options("--mesh=2x3x4").mesh == {"data": 2, "model": 3, "sequence": 4}
    assert parse_options("--mesh=rows=2,columns=4").mesh == {"rows": 2, "columns": 4}


def test_limits() -> None:
    ways = ("--effort=best", "--mode=propagate", "--rewrites=none", "--remat=full")
    options = parse_options("--memory-budget=40GB", "--deadline=2.5", *ways)
    assert (options.memory_budget, options.deadline_s) == (40 * 10**9, 2.5)
    buckets = {"25MB": 25_000_000, "8MiB": 8 << 20, "0": 0}
    assert {text: parse_options(f"--bucket={text}").bucket_bytes for text in buckets} == buckets
    assert (options.effort, options.mode, options.rewrites, options.remat) == ("best", "propagate", "none", "full")
    assert parse_options("--memory-budget=50%").memory_fraction == 0.5
    cut = parse_options("--micro-batches=4", "--micro-batch-inexact")
    assert (cut.micro_batches, cut.micro_batch_inexact) == (4, True)
    assert parse_options("--fused-attention=on").fused_attention == "on"
    assert parse_options("--expert-capacity=1.25").expert_capacity == 1.25
    assert [parse_options(*way).offload for way in ((), ("--offload=optimizer",))] == ["auto", "optimizer"]
    assert [parse_options(*way).simple for way in ((), ("--simple",), ("--no-simple",))] == [True, True, False]
    assert parse_options("--constraints=ignore").constraints == "ignore"
    piped = parse_options("--stages=4", "--schedule=2f2b")
    assert (piped.stages, piped.schedule) == (4, "2f2b")
    with pytest.raises(OptionError, match="'2b2f' is no schedule"):
        parse_options("--schedule=2b2f")
    plain = parse_options()
    assert (plain.stages, plain.schedule) == (None, None)
    assert (plain.micro_batches, plain.micro_batch_inexact, plain.constraints) == (None, False, "keep")
    assert (plain.memory_budget, plain.memory_fraction, plain.deadline_s) == (None, None, None)
    assert (plain.effort, plain.mode, plain.rewrites, plain.remat) == ("default", "search", "auto", "auto")


@pytest.mark.parametrize("text", ["", "x", "2x", "2x2x2x2", "a=1,a=2", "a=b", "2,4", "-1", "a=2,", "a b=2"])
def test_bad_meshes(text: str) -> None:
    with pytest.raises(OptionError, match="mesh"):
        parse_options(f"--mesh={text}")


def test_forced_strategies_and_pins() -> None:
    assert force_of([]) is None
    assert force_of(["fsdp"]) == "fsdp"
    assert force_of(["params['w']=replicated"]) == {"params['w']": "replicated"}
    assert (parse_options("--rest=data").rest, parse_options("--rest=data").force) == ("data", {})
    pins = force_of(["params['a=b']=0:model,1:-", "x=2:*"])
    assert pins == {"params['a=b']": {0: "model", 1: None}, "x": {2: True}}


@pytest.mark.parametrize("texts", [["fast"], ["data", "tensor"], ["w=model"], ["=0:x"], ["w=0:x,"]])
def test_bad_force(texts: list[str]) -> None:
    with pytest.raises(OptionError, match="neither a strategy nor the pins"):
        force_of(texts)


def test_clusters_by_count_and_by_file() -> None:
    assert cluster_of("4").device_count == 4
    assert cluster_of("cluster_configs/two_workers_cpu.json").device_count == 8
    with pytest.raises(ClusterConfigError, match="does not exist"):
        cluster_of("none.json")


def test_argument_types() -> None:
    matrix, scalar, flags = example_of("f32[8,16] s32[] pred[3]", None)
    assert (matrix.shape, matrix.dtype.name) == ((8, 16), "float32")
    assert (scalar.shape, scalar.dtype.name) == ((), "int32")
    assert flags.dtype.name == "bool"
    assert example_of("", None) == ()


@pytest.mark.parametrize("types", ["f32", "f32[a]", "q7[2]", "f32[2]{0}", "token[]"])
def test_bad_argument_types(types: str) -> None:
    with pytest.raises(OptionError, match="type") as caught:
        example_of(types, None)
    assert caught.value.where == "--args"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("math", "does not name a function"),
        ("math:", "does not name a function"),
        ("no_such_module:f", "module 'no_such_module' was not found"),
        ("math:cosine", "math has no 'cosine'"),
        ("math:pi", "not callable"),
    ],
)
def test_functions_that_cannot_be_loaded(name: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        load_function(name, "FUNCTION")


def test_numbers_and_names_of_arguments() -> None:
    assert arguments_of("", "--donate") == (None, None)
    assert arguments_of("0, 12", "--donate") == ((0, 12), None)
    assert arguments_of("params,1", "--static") == ((1,), ("params",))
    for text in ("0;1", "0,,1", "-1", "a b", "²"):
        with pytest.raises(OptionError, match="no list of arguments"):
            arguments_of(text, "--donate")


def test_modules_that_sessions_may_read_from() -> None:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_server_options(parser)
    options = parser.parse_args(["--dataset-modules", "my_data, other.pkg,my_data"])
    assert options.dataset_modules == "my_data,other.pkg"
    assert to_arguments(options) == ["--dataset-modules", "my_data,other.pkg"]
    assert to_arguments(parser.parse_args([])) == []
    with pytest.raises(argparse.ArgumentError, match="'my-data' is no name of a module"):
        parser.parse_args(["--dataset-modules", "my-data"])


@pytest.mark.parametrize(
    ("module", "is_one"), [("a", True), ("a.b", True), ("ab", False), ("b.c", True), ("b", False), ("b.cd", False)]
)
def test_a_module_is_allowed_by_its_name_or_its_packages(module: str, is_one: bool) -> None:
    assert is_allowed(module, ("a", "b.c")) is is_one
