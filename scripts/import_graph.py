"""Which file of the product imports which, type-only imports counted: circles of files, and classes with their methods.

    python scripts/import_graph.py [ROOM ...]    # circles and the largest classes of these rooms, e.g. client server

An import of a name counts as one of the file that the name is a submodule of, else of the package's `__init__`.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

#: The package that all product modules are in.
PACKAGE = "shardwright"

Graph = Mapping[str, frozenset[str]]


@cache
def list_modules() -> dict[str, Path]:
    """Files of the product by the names that they are imported by; folders may be links."""
    return dict(_walk(ROOT / PACKAGE, PACKAGE))


def _walk(folder: Path, package: str) -> Iterator[tuple[str, Path]]:
    for path in sorted(folder.iterdir()):
        if path.is_dir() and (path / "__init__.py").exists():
            yield from _walk(path, f"{package}.{path.name}")
        elif path.suffix == ".py":
            yield (package if path.stem == "__init__" else f"{package}.{path.stem}"), path


@cache
def read_imports() -> Graph:
    """Of each module, the modules of the product that it imports anywhere: at its top, in functions, for types."""
    return {name: frozenset(_imports_of(name, path)) - {name} for name, path in list_modules().items()}


def _imports_of(module: str, path: Path) -> Iterator[str]:
    package = module if path.stem == "__init__" else module.rpartition(".")[0]
    modules = list_modules()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:  # one dot is the package itself
                above = package.split(".")[: package.count(".") + 2 - node.level]
                base = ".".join([*above, *filter(None, [node.module])])
            names = (f"{base}.{alias.name}" for alias in node.names)
            yield from (target for name in names if (target := name if name in modules else base) in modules)


def select_room(graph: Graph, room: str) -> dict[str, frozenset[str]]:
    """The part of a graph that lies in a package, e.g. `server` or `client.frontends`."""
    prefix = f"{PACKAGE}.{room}"
    inside = {name for name in graph if name == prefix or name.startswith(f"{prefix}.")}
    return {name: graph[name] & inside for name in inside}


def find_circles(graph: Graph) -> list[list[str]]:
    """Modules that import each other in a circle, largest circle first: strongly connected components (Tarjan)."""
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    circles: list[list[str]] = []

    def visit(module: str) -> None:
        number[module] = lowest[module] = len(number)
        stack.append(module)
        for target in sorted(graph[module]):
            if target not in number:
                visit(target)
            if target in stack:
                lowest[module] = min(lowest[module], lowest[target])
        if lowest[module] == number[module]:
            start = stack.index(module)
            if len(stack) - start > 1:
                circles.append(sorted(stack[start:]))
            del stack[start:]

    for module in sorted(graph):
        if module not in number:
            visit(module)
    return sorted(circles, key=lambda circle: (-len(circle), circle))


def count_public_methods(modules: Collection[str]) -> dict[str, int]:
    """Public methods and properties that a class defines itself, by `module.Class`; overloads count once."""
    counts: dict[str, int] = {}
    for module in modules:
        for node in ast.walk(ast.parse(list_modules()[module].read_text())):
            if isinstance(node, ast.ClassDef):
                functions = [item for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)]
                names = {function.name for function in functions if not function.name.startswith("_")}
                counts[f"{module}.{node.name}"] = len(names)
    return counts


def main() -> None:
    for room in sys.argv[1:] or ["client", "server"]:
        graph = select_room(read_imports(), room)
        circles = find_circles(graph)
        print(f"{room}: {len(graph)} files, {len(circles)} circles")
        for circle in circles:
            print(f"  {len(circle)} files: {', '.join(name.removeprefix(f'{PACKAGE}.') for name in circle)}")
        counts = count_public_methods(graph)
        for name in sorted(counts, key=lambda name: -counts[name])[:3]:
            print(f"  {counts[name]} public methods: {name.removeprefix(f'{PACKAGE}.')}")


if __name__ == "__main__":
    main()
