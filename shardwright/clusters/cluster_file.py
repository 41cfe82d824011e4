"""Reading a cluster file.

The known shape is `{"master": {"ip", "port", "gpu_ids"}, "workers": [{…}, …]}`, TePDist's, whose numbers may be texts;
everything else is optional (`cluster.schema.json` documents each key). Task 0 is
the master and a worker too, unless `"coordinator_only": true`. A node with neither
`gpu_ids` nor `platform` runs CPU devices.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardwright.clusters.access_tokens import Caller, hash_of, parse_tokens
from shardwright.clusters.cluster import (
    DEFAULT_HARDWARE,
    Cluster,
    ClusterNode,
    Security,
    join_hardware,
    min_memory_bytes,
)
from shardwright.clusters.cluster_schema import check_schema
from shardwright.clusters.links import Link, LinkProblem, read_link
from shardwright.clusters.module_names import check_module_names
from shardwright.clusters.secret_files import exposure_of, read_secret_file
from shardwright.errors import ClusterConfigError
from shardwright.input_files import read_input_text
from shardwright.json_reader import JsonProblem, load_json

#: How names of cluster files end that hold YAML.
YAML_SUFFIXES = (".yml", ".yaml")

_EXAMPLE = 'write one: {"master": {"ip": "127.0.0.1", "port": 2222, "devices": 8}, "workers": []}'

_HOST_NAME = re.compile(
    r"(?=.{1,253}$)[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?)*"
)


def read_text(path: Path) -> str:
    """A cluster file's text. Raises ClusterConfigError if it cannot be read."""
    try:
        return read_input_text(path)
    except FileNotFoundError:
        raise _error(path, "the file does not exist", _EXAMPLE) from None
    except UnicodeDecodeError:
        raise _error(path, "the file is not UTF-8 text", "save it as UTF-8") from None
    except OSError as error:
        raise _error(path, f"the file cannot be read ({error.strerror})", "check path and permissions") from None


def read_cluster(text: str, source: str, directory: Path, *, for_planning: bool = False) -> Cluster:
    """The cluster described by JSON text, or YAML where `source` ends so; paths in it are relative to `directory`.

    source: the text's name in errors. for_planning: leave out security, whose files belong to the nodes. Raises
    ClusterConfigError with source, field, problem and remedy.
    """
    data = _read_number_texts(_parse(text, source), source)
    check_schema(data, source)
    platform = _platform(data, source)
    nodes = _nodes(data, source, platform)
    _check_addresses(data, nodes, source)
    token, security = (None, None) if for_planning else _security(data, source, directory)
    if not for_planning:
        _check_protection(nodes, token, security, data.get("insecure", False), source)
    workers = [node for node in nodes if node.device_count]
    _check_sizes(data, len(workers), source)
    return Cluster(
        name=data.get("name", Path(source).stem),
        nodes=nodes,
        platform=platform,
        hardware=join_hardware(node.hardware for node in workers),
        memory_bytes_per_device=min_memory_bytes(workers, None),
        host_memory_bytes_per_device=int(data["host_memory_gib"] * 2**30) if "host_memory_gib" in data else None,
        intra_node=_link(data, "intra_node", nodes, source),
        inter_node=_link(data, "inter_node", nodes, source),
        overlap=data.get("links", {}).get("overlap"),
        security=security,
        insecure=data.get("insecure", False),
        token=token,
        min_nodes=data.get("min_nodes", 1 if "max_nodes" in data else None),
        max_nodes=data.get("max_nodes"),
        dataset_modules=_dataset_modules(data, source),
    )


def _dataset_modules(data: Mapping[str, Any], source: str) -> tuple[str, ...]:
    try:
        return check_module_names(data.get("dataset_modules", ()))
    except ValueError as error:
        remedy = 'write names as Python imports them, e.g. ["my_data", "other.pkg"]'
        raise _error(source, str(error), remedy, field="dataset_modules") from None


def _error(source: str | Path, message: str, remedy: str, *, field: str = "") -> ClusterConfigError:
    return ClusterConfigError(message, where=f"{source}: {field}" if field else str(source), remedy=remedy)


def _parse(text: str, source: str) -> dict[str, Any]:
    kind, read = ("YAML", _load_yaml) if Path(source).suffix in YAML_SUFFIXES else ("JSON", load_json)
    try:
        data = read(text)
    except JsonProblem as problem:
        where = f"{source}:{problem.line}:{problem.column}" if problem.line else source
        raise _error(where, f"not valid {kind}: {problem.message}", f"mend the {kind} there") from None
    if not isinstance(data, dict):
        start = "master:" if kind == "YAML" else '{"master": …'
        raise _error(source, f"expected a {kind} object, found {type(data).__name__}", f"start with {start}")
    return data


#: Keys of a node that TePDist's files give as texts: `"port": "2222"`, `"gpu_ids": "1,2"`.
_NUMBERS = ("port", "data_port", "devices")
_NUMBER = re.compile(r"[0-9]{1,18}")


def _read_number_texts(data: dict[str, Any], source: str) -> dict[str, Any]:
    """The data with the numbers of its nodes as numbers, where they are written as texts."""
    workers = data.get("workers")
    if "master" in data:
        data = {**data, "master": _read_node_numbers(data["master"], source, _field(0))}
    if isinstance(workers, list):
        nodes = [_read_node_numbers(node, source, _field(index)) for index, node in enumerate(workers, start=1)]
        data = {**data, "workers": nodes}
    return data


def _read_node_numbers(node: Any, source: str, field: str) -> Any:
    if not isinstance(node, dict):
        return node
    node = {key: _to_number(value) if key in _NUMBERS else value for key, value in node.items()}
    written = node.get("gpu_ids")
    if isinstance(written, str):
        written = [part.strip() for part in written.split(",")] if written.strip() else []
    if isinstance(written, list):
        node["gpu_ids"] = [_to_number(part) for part in written]
        wrong = next((part for part in node["gpu_ids"] if isinstance(part, str)), None)
        if wrong is not None:
            problem = f"{wrong!r} is no number of a GPU"
            remedy = 'list the GPUs that nvidia-smi numbers: "gpu_ids": [0, 1], or "0,1"'
            raise _error(source, problem, remedy, field=f"{field}.gpu_ids")
    return node


def _to_number(value: Any) -> Any:
    """The number that a text of digits spells; everything else as it is."""
    return int(value) if isinstance(value, str) and _NUMBER.fullmatch(value.strip()) else value


def _load_yaml(text: str) -> Any:
    from shardwright.clusters.yaml_text import load_yaml  # PyYAML, for those who write it

    return load_yaml(text).data


def _field(index: int) -> str:
    return "master" if index == 0 else f"workers[{index - 1}]"


def _contributing_nodes(data: Mapping[str, Any]) -> list[tuple[int, Mapping[str, Any]]]:
    """(task, node object) of the nodes that contribute devices."""
    first = [] if data.get("coordinator_only") else [(0, data["master"])]
    return first + list(enumerate(data.get("workers", []), start=1))


def _platform(data: Mapping[str, Any], source: str) -> str:
    """The one platform of all nodes that contribute devices."""
    contributing = _contributing_nodes(data)
    if not contributing:
        raise _error(
            source,
            "no node contributes a device: the master only coordinates and there are no workers",
            "add workers, or drop coordinator_only",
            field="coordinator_only",
        )
    default = data.get("platform")
    first_node_of_platform: dict[str, int] = {}
    for index, node in contributing:
        platform = node.get("platform") or default or ("cuda" if node.get("gpu_ids") else "cpu")
        first_node_of_platform.setdefault(platform, index)
    if len(first_node_of_platform) > 1:
        kinds = ", ".join(f"{platform} at {_field(index)}" for platform, index in first_node_of_platform.items())
        raise _error(source, f"the nodes run different platforms ({kinds})", "use one platform in one cluster file")
    return next(iter(first_node_of_platform))


def _nodes(data: Mapping[str, Any], source: str, platform: str) -> tuple[ClusterNode, ...]:
    hardware, memory = data.get("hardware", DEFAULT_HARDWARE[platform]), _memory_bytes(data, source)
    nodes = []
    for index, node in enumerate([data["master"], *data.get("workers", [])]):
        contributes = index > 0 or not data.get("coordinator_only", False)
        cluster_node = _node(index, node, source, platform, contributes=contributes)
        own = _memory_bytes(node, source, f"{_field(index)}.")
        nodes.append(
            replace(cluster_node, hardware=node.get("hardware", hardware), memory_bytes=memory if own is None else own)
        )
    lacking = next((node for node in nodes if node.device_count and node.memory_bytes is None), None)
    if lacking is not None and any(node.memory_bytes for node in nodes):
        remedy = "give memory_gib for every node, or once for all of them"
        raise _error(source, "other nodes say what memory their devices have", remedy, field=_field(lacking.index))
    return tuple(nodes)


def _node(index: int, node: Mapping[str, Any], source: str, platform: str, *, contributes: bool) -> ClusterNode:
    field = _field(index)
    gpu_ids = tuple(node.get("gpu_ids", ()))
    devices = node.get("devices")
    if platform == "cuda":
        if contributes and not gpu_ids:
            raise _error(source, "a CUDA node needs its GPUs", 'add "gpu_ids": [0, …]', field=f"{field}.gpu_ids")
        if devices is not None and devices != len(gpu_ids):
            problem = f"devices is {devices}, but gpu_ids names {len(gpu_ids)}"
            raise _error(source, problem, "drop devices: gpu_ids says it", field=f"{field}.devices")
        count = len(gpu_ids)
    else:
        if gpu_ids and contributes:
            problem = f"gpu_ids on a node with platform {platform}"
            raise _error(source, problem, 'drop gpu_ids, or set "platform": "cuda"', field=f"{field}.gpu_ids")
        if platform == "tpu" and contributes and devices is None:
            raise _error(source, "a TPU node needs its chip count", 'add "devices": 8', field=f"{field}.devices")
        count = devices or 1
    return ClusterNode(
        index=index,
        ip=node["ip"],
        port=node["port"],
        data_port=node.get("data_port"),
        device_count=count if contributes else 0,
        gpu_ids=gpu_ids if contributes else (),
    )


def _check_addresses(data: Mapping[str, Any], nodes: tuple[ClusterNode, ...], source: str) -> None:
    """Every address is one that others can dial, and no two ports of a machine are the same."""
    field_of_port: dict[tuple[str, int], str] = {}
    for node in nodes:
        field = _field(node.index)
        check_host(node.ip, source, f"{field}.ip")
        host = "loopback" if node.ip.lower() in ("localhost", "127.0.0.1", "::1") else node.ip.lower()
        for key, port in (("port", node.port), ("data_port", node.data_port)):
            if port is None:
                continue
            other = field_of_port.setdefault((host, port), f"{field}.{key}")
            if other != f"{field}.{key}":
                problem = f"{node.ip}:{port} is already taken by {other}"
                raise _error(source, problem, "give each node of a machine its own port", field=f"{field}.{key}")
        if node.is_loopback != nodes[0].is_loopback:
            problem = f"{node.ip} and the master's {nodes[0].ip} cannot reach each other: one of them is loopback"
            raise _error(source, problem, "give both an address of the same network", field=f"{field}.ip")


def check_host(host: str, source: str, field: str) -> None:
    """Raises ClusterConfigError unless others can dial it: an IP address or a host name."""
    try:
        unspecified = ipaddress.ip_address(host).is_unspecified
    except ValueError:
        looks_numeric = re.fullmatch(r"[0-9.]+", host) is not None
        if looks_numeric or not _HOST_NAME.fullmatch(host):
            problem = f"{host!r} is neither an IP address nor a host name"
            raise _error(source, problem, "write the address only; the port has its own key", field=field) from None
        return
    if unspecified:
        problem = f"{host} is not an address that other nodes can dial"
        raise _error(source, problem, "write the address that the others reach this machine by", field=field)


def _check_sizes(data: Mapping[str, Any], workers: int, source: str) -> None:
    """An elastic cluster can have as many nodes as it needs."""
    least, most = data.get("min_nodes", 1), data.get("max_nodes")
    if least > workers:
        problem = f"{least} nodes at least, but the file has {workers} that contribute devices"
        raise _error(source, problem, "add workers, or lower min_nodes", field="min_nodes")
    if most is not None and most < least:
        problem = f"at most {most} nodes, and at least {least}"
        raise _error(source, problem, "a number that is not below min_nodes", field="max_nodes")


def _security(data: Mapping[str, Any], source: str, directory: Path) -> tuple[str | None, Security | None]:
    keys = data.get("security")
    if keys is None:
        return None, None
    if "token" in keys and "token_file" in keys:
        raise _error(source, "both token and token_file are given", "keep one of them", field="security")
    if ("certificate" in keys) != ("key" in keys):
        missing = "key" if "certificate" in keys else "certificate"
        problem = "certificate and key belong together"
        raise _error(source, problem, f"add security.{missing}", field=f"security.{missing}")
    if "ca" in keys and "certificate" not in keys:
        raise _error(source, "a ca without certificate and key", "add both, or drop ca", field="security.ca")
    token = keys.get("token")
    if "token_file" in keys:
        token = _read_token(directory / keys["token_file"], source)
    if "tokens_file" in keys:
        read_tokens(directory / keys["tokens_file"], source, nodes_token=token)
    if token is not None and not (token.isascii() and token.isprintable()):
        field = "security.token_file" if "token_file" in keys else "security.token"
        problem = "the token holds characters that no call can carry"
        raise _error(source, problem, "use printable ASCII characters", field=field)
    paths = {key: directory / keys[key] for key in ("certificate", "key", "ca", "tokens_file") if key in keys}
    return token, Security(**paths)


def check_own_secrecy(path: Path, text: str) -> None:
    """Raises ClusterConfigError where a cluster file itself holds a token, and others can read the file."""
    if "token" not in (_parse(text, str(path)).get("security") or {}):
        return
    exposure = exposure_of(path, path.stat())
    if exposure is not None:
        problem, remedy = exposure
        remedy = f"{remedy}, or move the token to a file of its own (security.token_file)"
        raise _error(path, f"{problem}, and holds a token", remedy, field="security.token")


def read_tokens(path: Path, source: str, *, nodes_token: str | None = None) -> Mapping[str, Caller]:
    """Callers by the hash of their tokens, from a `tokens_file`.

    Raises ClusterConfigError with file, line, problem and remedy.
    """
    field = "security.tokens_file"
    text = _read_secret(path, source, field, "create it on every node, with the same lines")

    def refuse(line: int, problem: str, remedy: str) -> ClusterConfigError:
        return _error(source, f"{path}, line {line}: {problem}", remedy, field=field)

    callers = parse_tokens(text, refuse)
    if nodes_token is not None and (same := callers.get(hash_of(nodes_token))) is not None:
        problem = f"{path}: {same.name} has the token of the nodes"
        raise _error(source, problem, "make a token of its own for each", field=field)
    return callers


def _read_secret(path: Path, source: str, field: str, remedy: str) -> str:
    def refuse(problem: str, remedy: str) -> ClusterConfigError:
        return _error(source, problem, remedy, field=field)

    try:
        return read_secret_file(path, refuse).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        problem = f"{path} cannot be read ({getattr(error, 'strerror', None) or 'not text'})"
        raise _error(source, problem, remedy, field=field) from None


def _read_token(path: Path, source: str) -> str:
    token = _read_secret(path, source, "security.token_file", "create it on every node, with the same token").strip()
    if not token:
        raise _error(source, f"{path} is empty", "put the shared token into it", field="security.token_file")
    return token


def _check_protection(
    nodes: tuple[ClusterNode, ...], token: str | None, security: Security | None, insecure: bool, source: str
) -> None:
    """Ports that other machines can reach need TLS and a token, or the user's word that they do not."""
    if insecure:
        return
    open_node = next((node for node in nodes if not node.is_loopback), None)
    if open_node is None or (security is not None and security.has_tls and token):
        return
    missing = "security.token" if security is not None and security.has_tls else "security.certificate and security.key"
    if security is not None and security.tokens_file is not None and security.has_tls:
        missing += ": tokens_file is for people, the nodes have a token of their own"
    problem = f"{open_node.ip} is reachable from other machines, but the file has no {missing}"
    remedy = 'add security {"token_file", "certificate", "key"}, or set "insecure": true on a network you trust'
    raise _error(source, problem, remedy, field=f"{_field(open_node.index)}.ip")


def _memory_bytes(data: Mapping[str, Any], source: str, within: str = "") -> int | None:
    if "memory_bytes" in data and "memory_gib" in data:
        problem = "both memory_bytes and memory_gib are given"
        raise _error(source, problem, "keep one of them", field=f"{within}memory_gib")
    if "memory_gib" in data:
        return int(data["memory_gib"] * 2**30)
    memory: int | None = data.get("memory_bytes")
    return memory


def _link(data: Mapping[str, Any], which: str, nodes: tuple[ClusterNode, ...], source: str) -> Link | None:
    written = data.get("links", {}).get(which)
    if written is None:
        return None
    devices = max(node.device_count for node in nodes)
    try:
        return read_link(written, devices_of_node=devices, is_inside_node=which == "intra_node")
    except LinkProblem as problem:
        raise _error(source, str(problem), problem.remedy, field=f"links.{which}") from None
