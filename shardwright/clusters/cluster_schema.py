"""Checks a cluster file against `cluster.schema.json` and words each finding for its reader."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from shardwright.errors import ClusterConfigError
from shardwright.json_reader import format_value, is_number
from shardwright.spelling import did_you_mean, nearest

_SCHEMA_PATH = Path(__file__).with_name("cluster.schema.json")


@cache
def schema() -> dict[str, Any]:
    """The JSON schema of cluster files."""
    loaded: dict[str, Any] = json.loads(_SCHEMA_PATH.read_text(encoding="utf-8"))
    return loaded


def check_schema(data: Mapping[str, Any], source: str) -> None:
    """Raises ClusterConfigError on the first key or value forbidden by the schema."""
    from jsonschema import Draft202012Validator

    problem = next(_unusable_values(data, ()), None)
    if problem is not None:
        parts, message, remedy = problem
        raise ClusterConfigError(message, where=f"{source}: {_field_path(parts)}", remedy=remedy)
    findings = sorted(Draft202012Validator(schema()).iter_errors(data), key=lambda error: [str(p) for p in error.path])
    if not findings:
        return
    finding = findings[0]
    path = _field_path(finding.absolute_path)
    message, remedy, key = _describe_finding(finding)
    field = ".".join(part for part in (path, key) if part)
    raise ClusterConfigError(message, where=f"{source}: {field}" if field else source, remedy=remedy)


def _unusable_values(data: Any, path: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], str, str]]:
    """(path, problem, remedy) of each value accepted by no field, though JSON can spell it."""
    if isinstance(data, dict):
        for key, value in data.items():
            if not key.isprintable():
                yield (
                    path,
                    f"the key {format_value(key)} holds a character that cannot be printed",
                    "rename or drop the key",
                )
            yield from _unusable_values(value, (*path, key))
    elif isinstance(data, list):
        for index, value in enumerate(data):
            yield from _unusable_values(value, (*path, index))
    elif isinstance(data, str):
        if not data.isprintable():
            yield path, f"{format_value(data)} holds a character that cannot be printed", "write plain text"
    elif data is not None and not is_number(data) and not isinstance(data, bool):
        yield path, f"{format_value(data)} is out of range", "write a finite number of at most 64 bits"


def _field_path(parts: Iterable[str | int]) -> str:
    """`workers[1].port` from ("workers", 1, "port")."""
    path = ""
    for part in parts:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


def _describe_finding(finding: Any) -> tuple[str, str, str]:
    """(problem, remedy, key to append to the path) of one jsonschema error."""
    match finding.validator:
        case "additionalProperties":
            return _unknown_key(finding)
        case "required":
            key = next(key for key in finding.validator_value if key not in finding.instance)
            return "the key is missing", f'add "{key}"', key
        case "type":
            expected = finding.validator_value
            expected = expected if isinstance(expected, str) else " or ".join(expected)
            return f"expected {_article(expected)}, found {_to_json_text(finding.instance)}", "change the value", ""
        case "enum":
            allowed_values = ", ".join(finding.validator_value)
            near = nearest(str(finding.instance), finding.validator_value)
            remedy = f'use "{near[0]}"' if near else f"use one of {allowed_values}"
            return f"{_to_json_text(finding.instance)} is not one of {allowed_values}", remedy, ""
        case "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum":
            return f"{finding.instance} is out of range", f"use a number {_describe_range(finding.schema)}", ""
        case "minLength":
            return "the text is empty", "fill it in, or drop the key", ""
        case "uniqueItems":
            return f"{_to_json_text(finding.instance)} names a device twice", "list each device once", ""
        case _:
            return str(finding.message), "see shardwright/clusters/cluster.schema.json", ""


def _to_json_text(value: Any) -> str:
    """A value in JSON's spelling, in at most 60 characters."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "…"


def _describe_range(limits: Mapping[str, Any]) -> str:
    """The numbers allowed by a schema, in words."""
    if "minimum" in limits and "maximum" in limits:
        return f"between {limits['minimum']} and {limits['maximum']}"
    low = f"at least {limits['minimum']}" if "minimum" in limits else f"above {limits.get('exclusiveMinimum', 0)}"
    if "maximum" in limits:
        return f"{low} and at most {limits['maximum']}"
    return f"{low} and below {limits['exclusiveMaximum']}" if "exclusiveMaximum" in limits else low


def _article(expected: str) -> str:
    return f"{'an' if expected[0] in 'aeiou' else 'a'} {expected}"


def _unknown_key(finding: Any) -> tuple[str, str, str]:
    schema_keys = list(finding.schema["properties"])
    key = next(key for key in finding.instance if key not in schema_keys)
    meant = did_you_mean(key, schema_keys)
    if meant:
        return f"unknown key {key!r}", meant, ""
    home = next((place for place, keys in _describe_key_places().items() if key in keys and keys != schema_keys), None)
    if home:
        return f"unknown key {key!r} here", f"move it {home}", ""
    return f"unknown key {key!r}", f"the keys here are {', '.join(schema_keys)}", ""


def _describe_key_places() -> dict[str, list[str]]:
    """The place of each known key, in words."""
    top = schema()["properties"]
    return {
        "to the top level": list(top),
        "into master or a worker": list(schema()["$defs"]["node"]["properties"]),
        "into security": list(top["security"]["properties"]),
        "into links": list(top["links"]["properties"]),
    }
