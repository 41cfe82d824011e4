"""`shardwright lower`: HLO text of a user's function on a cluster's platform, from any machine."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from shardwright.cli.options import add_cluster_option, cluster_of
from shardwright.cli.output import EXIT_OK, STANDARD_STREAM, add_command, note, print_json, write_text
from shardwright.clusters.cluster import PLATFORMS
from shardwright.errors import OptionError, ShardwrightError, UnsupportedProgramError
from shardwright.hlo.source import is_library

if TYPE_CHECKING:
    from shardwright.client.array_specs import ArrayType
    from shardwright.client.frontends.program import Program


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser], common: argparse.ArgumentParser) -> None:
    parser = add_command(
        commands,
        common,
        "lower",
        summary="HLO text of a Python function",
        description=(
            "Lower a JAX function to HLO text, with source lines, for a cluster's platform. No accelerator and no\n"
            "arrays are needed: arguments are given by type, or by a function that returns them (arrays or\n"
            "jax.ShapeDtypeStruct, in pytrees of any shape)."
        ),
        examples=(
            "shardwright lower mymodel:step --args 'f32[8,16] s32[8]' --out step.hlo",
            "shardwright lower mymodel:step --example mymodel:example_arguments --cluster cluster.json",
            "shardwright lower examples.mlp.train:train_step --example examples.mlp.train:example_arguments",
        ),
    )
    add_function(parser)
    where = parser.add_mutually_exclusive_group()
    add_cluster_option(where, required=False)  # type: ignore[arg-type]  # a group adds arguments as a parser does
    where.add_argument("--platform", choices=PLATFORMS, help="lower for this platform (default: cpu)")
    parser.add_argument("--hardware", metavar="NAME", help="the cluster's devices: a100, h100, …, or a profile's path")
    parser.add_argument("--out", metavar="FILE", default=STANDARD_STREAM, help="default: standard output")
    parser.add_argument("--json", action="store_true", help="print a summary with the text as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Import the function, lower it, write its HLO text."""
    cluster = cluster_of(arguments.cluster, for_planning=True) if arguments.cluster else None
    platform = cluster.platform if cluster else arguments.platform or "cpu"
    hardware = arguments.hardware or (cluster.hardware if cluster else None)
    function, example, kinds = read_function(arguments)

    from shardwright.client.lowering import lower

    with user_errors_as_messages(arguments.function, is_debug=arguments.debug):
        program = lower(function, *example, **kinds, platform=platform, hardware=hardware)
    if arguments.json:
        print_json(_summary(program, arguments.function, platform))
        return EXIT_OK
    write_text(arguments.out, program.hlo_text)
    if arguments.out != STANDARD_STREAM:
        note(f"HLO text: {arguments.out}")
    return EXIT_OK


def add_function(parser: argparse.ArgumentParser) -> None:
    """The arguments that say which function, and what it is called with; `read_function` reads them."""
    parser.add_argument("function", metavar="PKG.MODULE:FUNCTION", help="imported from the current folder or the path")
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument("--args", metavar="TYPES", help="argument types, e.g. 'f32[8,16] s32[]'; '' for none")
    how.add_argument("--example", metavar="PKG.MODULE:FUNCTION", help="returns a tuple of example arguments")
    parser.add_argument("--donate", metavar="I,J", default="", help="numbers or names of arguments to update in place")
    parser.add_argument("--static", metavar="I,J", default="", help="numbers or names of those that are no arrays")


def read_function(arguments: argparse.Namespace) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """The function, example arguments, and which of them are donated and static. Raises OptionError."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # this process needs no accelerator, and should take none
    if "" not in sys.path:
        sys.path.insert(0, "")
    function = load_function(arguments.function, "FUNCTION")
    with user_errors_as_messages(arguments.example, is_debug=arguments.debug):
        example = example_of(arguments.args, arguments.example)
    donated = arguments_of(arguments.donate, "--donate")
    static = arguments_of(arguments.static, "--static")
    return (
        function,
        example,
        {
            "donate_argnums": donated[0],
            "donate_argnames": donated[1],
            "static_argnums": static[0],
            "static_argnames": static[1],
        },
    )


@contextmanager
def user_errors_as_messages(name: str, *, is_debug: bool) -> Iterator[None]:
    """Turn any error of the user's function into an OptionError: its line, and the way to see the rest.

    is_debug: leave errors unchanged.
    """
    try:
        yield
    except ShardwrightError:
        raise
    except Exception as error:
        if is_debug:
            raise
        what, _, _ = str(error).strip().partition("\n")
        raise OptionError(
            f"{name} raised {type(error).__name__}: {what}",
            where=_user_line(error) or "FUNCTION",
            remedy="mend the function or the types of its arguments; --debug shows the traceback",
        ) from None


def _user_line(error: Exception) -> str:
    """`model.py:3`, the innermost frame under our call outside any library; empty if the call itself failed."""
    from shardwright.client.frontends.jax import function as front_end

    frames = traceback.extract_tb(error.__traceback__)
    called_at = max(
        (i for i, frame in enumerate(frames) if frame.filename in (__file__, front_end.__file__)), default=0
    )
    theirs = [frame_below for frame_below in frames[called_at + 1 :] if not is_library(frame_below.filename)]
    return f"{theirs[-1].filename}:{theirs[-1].lineno}" if theirs else ""


def _summary(program: Program, name: str, platform: str) -> dict[str, Any]:
    def types(items: Sequence[ArrayType]) -> list[dict[str, Any]]:
        return [{"name": item.name, "type": item.element_type, "shape": list(item.shape)} for item in items]

    return {
        "function": name,
        "platform": platform,
        "arguments": types(program.arguments),
        "outputs": types(program.outputs),
        "hlo": program.hlo_text,
    }


def load_function(name: str, where: str) -> Callable[..., Any]:
    """The callable behind `pkg.module:function`. Raises OptionError on each way of failing."""
    module_name, separator, attribute = name.partition(":")
    if not (module_name and separator and attribute):
        raise OptionError(f"{name!r} does not name a function", where=where, remedy="write pkg.module:function")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        remedy = "run from the folder that holds it, or install it"
        raise OptionError(f"module {error.name!r} was not found", where=where, remedy=remedy) from None
    function = module
    for part in attribute.split("."):
        if not hasattr(function, part):
            callables = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
            remedy = f"it has {', '.join(callables)}" if callables else "check the spelling"
            raise OptionError(f"{module_name} has no {attribute!r}", where=where, remedy=remedy)
        function = getattr(function, part)
    if not callable(function):
        raise OptionError(f"{name} is not callable", where=where, remedy="name a function")
    return function


def example_of(types: str | None, example: str | None) -> tuple[Any, ...]:
    """The arguments to lower with, from `--args` or from `--example`. Raises OptionError."""
    if types is not None:
        return tuple(_abstract_array(text) for text in types.split())
    result = load_function(example or "", "--example")()
    if not isinstance(result, tuple):
        problem = f"{example} returned {type(result).__name__}, not a tuple of arguments"
        raise OptionError(problem, where="--example", remedy="return (argument 0, argument 1, …)")
    return result


def _abstract_array(text: str) -> Any:
    """A jax.ShapeDtypeStruct from `f32[8,16]`."""
    from jax import ShapeDtypeStruct
    from jax.dtypes import canonicalize_dtype

    from shardwright.dtypes import to_dtype, to_element_type

    match = re.fullmatch(r"([a-z]\w*)\[((?:\d+(?:,\d+)*)?)\]", text)
    remedy = "write types as HLO does: f32[8,16] s32[]"
    if match is None:
        raise OptionError(f"{text!r} is not an array type", where="--args", remedy=remedy)
    try:
        dtype = to_dtype(match[1])
    except UnsupportedProgramError:
        raise OptionError(f"{match[1]!r} is not an element type", where="--args", remedy=remedy) from None
    if (computed := canonicalize_dtype(dtype)) != dtype:
        problem = f"JAX would compute {match[1]} as {to_element_type(computed)}"
        raise OptionError(problem, where="--args", remedy="set JAX_ENABLE_X64=1, or write the narrower type")
    return ShapeDtypeStruct(tuple(int(size) for size in match[2].split(",") if size), dtype)  # type: ignore[no-untyped-call]


def arguments_of(text: str, where: str) -> tuple[tuple[int, ...] | None, tuple[str, ...] | None]:
    """`0,params` → ((0,), ("params",)); None: neither kind. Raises OptionError."""
    items = [item.strip() for item in text.split(",")] if text.strip() else []
    if not all(re.fullmatch(r"[0-9]{1,9}", item) or item.isidentifier() for item in items):
        remedy = "write numbers or names: 0,1 or params"
        raise OptionError(f"{text!r} is no list of arguments", where=where, remedy=remedy)
    numbers = tuple(int(item) for item in items if item.isdigit())
    names = tuple(item for item in items if not item.isdigit())
    return numbers or None, names or None
