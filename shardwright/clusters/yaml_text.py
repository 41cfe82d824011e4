"""YAML read as strictly as JSON: the same kinds of values, each key once, and the line of everything."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import yaml

from shardwright.json_reader import JsonProblem

#: A path in the data: keys and positions, outermost first.
Path = tuple[str | int, ...]

#: Mappings, lists and values within each other, and in all; anchors count wherever they are used. PyYAML reads some
#: 100,000 characters or 20,000 values a second.
_MAX_DEPTH = 100
_MAX_VALUES = 10_000
_MAX_CHARACTERS = 100_000


@dataclass(frozen=True, slots=True)
class YamlText:
    """The data of a YAML text, and the line of each part of it, from 1."""

    data: Any
    lines: dict[Path, int] = field(default_factory=dict)

    def line(self, path: Path) -> int:
        """The line of a part, or of the nearest part around it that is there."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 1)


def load_yaml(text: str) -> YamlText:
    """The data of one YAML document: mappings with text keys, lists, texts, finite numbers, true, false and null.

    Raises JsonProblem with the place of what is no YAML, or has no like in JSON.
    """
    if len(text) > _MAX_CHARACTERS:
        raise JsonProblem(f"more than {_MAX_CHARACTERS:,} characters; JSON may have more")
    try:
        loader = _BoundedLoader(text)
        node = loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = (mark.line + 1, mark.column + 1) if mark else (0, 0)
        raise JsonProblem(error.problem or error.context or "unreadable", *place) from None
    except yaml.YAMLError as error:
        raise JsonProblem(str(error).partition("\n")[0]) from None
    reader = _NodeReader(loader)
    return YamlText(None if node is None else reader.read(node, ()), reader.lines)


class _BoundedLoader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML has no types
    """Refuses what is nested too deeply, or has too many values, as it is met: PyYAML is slow, the more the deeper."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0
        self._count = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._depth += 1
        self._count += 1
        if self._depth > _MAX_DEPTH or self._count > 2 * _MAX_VALUES:  # keys are nodes, too
            problem = "nested too deeply" if self._depth > _MAX_DEPTH else "too many values"
            raise yaml.composer.ComposerError(None, None, problem, self.peek_event().start_mark)
        node: yaml.Node | None = super().compose_node(parent, index)
        self._depth -= 1
        return node


class _NodeReader:
    """YAML nodes → data, and the line of each."""

    def __init__(self, loader: yaml.SafeLoader) -> None:
        self._loader = loader
        self._count = 0
        self.lines: dict[Path, int] = {}

    def read(self, node: yaml.Node, path: Path) -> Any:
        self.lines.setdefault(path, node.start_mark.line + 1)
        self._count += 1
        if len(path) > _MAX_DEPTH or self._count > _MAX_VALUES:
            raise _problem(node, "nested too deeply" if len(path) > _MAX_DEPTH else "too many values")
        if isinstance(node, yaml.MappingNode):
            return self._read_mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.read(item, (*path, number)) for number, item in enumerate(node.value)]
        return self._read_scalar(node)

    def _read_mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        data: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = self._read_scalar(key_node) if isinstance(key_node, yaml.ScalarNode) else None
            if not isinstance(key, str):
                raise _problem(key_node, "a key that is no text")
            if key in data:
                raise _problem(key_node, f"key {key!r} appears twice in one mapping")
            self.lines[(*path, key)] = key_node.start_mark.line + 1
            data[key] = self.read(value_node, (*path, key))
        return data

    def _read_scalar(self, node: yaml.Node) -> Any:
        try:
            value = self._loader.construct_object(node)
        except (yaml.YAMLError, ValueError):
            raise _problem(node, f"{node.value!r} cannot be read") from None
        if value is not None and not isinstance(value, bool | int | float | str):
            raise _problem(node, f"{node.value!r} is no text, number, true, false or null; write it in quotes")
        if isinstance(value, float) and not math.isfinite(value):
            raise _problem(node, f"{node.value} is no finite number")
        return value


def _problem(node: yaml.Node, message: str) -> JsonProblem:
    return JsonProblem(message, node.start_mark.line + 1, node.start_mark.column + 1)
