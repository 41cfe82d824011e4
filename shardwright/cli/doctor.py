"""`shardwright doctor`: what is there, what is missing, and how to get it."""

from __future__ import annotations

import argparse
import os
import platform
import re
import socket
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from shardwright.cli.options import add_cluster_option, cluster_of
from shardwright.cli.output import EXIT_OK, EXIT_UNHEALTHY, add_command, print_json
from shardwright.cli.tuning import COMFORTABLE_MEMORY_BYTES, CONNECT_DEADLINE_S, DEVICES_DEADLINE_S, STATUS_DEADLINE_S
from shardwright.clusters.cluster import Cluster, ClusterNode
from shardwright.errors import ShardwrightError

#: Extras of pyproject.toml that bring a framework, by whose users they are for.
_FRAMEWORKS = {"keras": "Keras", "tensorflow": "TensorFlow", "torch": "PyTorch"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One check's result. remedy: the way to get a missing part."""

    name: str
    ok: bool
    detail: str
    remedy: str = ""


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser], common: argparse.ArgumentParser) -> None:
    parser = add_command(
        commands,
        common,
        "doctor",
        summary="check this machine",
        description="Check versions, devices, memory, and the ports of a cluster file. Changes nothing.",
        examples=("shardwright doctor", "shardwright doctor --cluster cluster.json --json"),
    )
    add_cluster_option(parser, required=False)
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    cluster = cluster_of(arguments.cluster) if arguments.cluster else None
    findings = run_checks(cluster)
    if arguments.json:
        print_json({"ok": all(finding.ok for finding in findings), "findings": [asdict(item) for item in findings]})
    else:
        for finding in findings:
            print(f"{'ok     ' if finding.ok else 'MISSING'}  {finding.name:<24} {finding.detail}")
            if finding.remedy:
                print(f"{'':<9}{'':<24} → {finding.remedy}")
    return EXIT_OK if all(finding.ok for finding in findings) else EXIT_UNHEALTHY


def run_checks(cluster: Cluster | None) -> list[Finding]:
    """All findings about this machine and, if given, about a cluster's ports."""
    checks: list[Callable[[], Iterator[Finding]]] = [_python, _packages, _extras, _private_names, _devices, _memory]
    findings = [finding for check in checks for finding in check()]
    if cluster is not None:
        master = cluster.master
        if master.port:
            findings.append(_master(cluster) if _answers(master) else _node_port(master))
        findings += [_node_port(node) for node in cluster.nodes[1:]]
    return findings


def _python() -> Iterator[Finding]:
    version = platform.python_version()
    ok = sys.version_info >= (3, 11)
    yield Finding(name="python", ok=ok, detail=version, remedy="" if ok else "install Python 3.11 or newer")


def _packages() -> Iterator[Finding]:
    """Each package required by Shardwright, its version, and whether that is new enough."""
    for requirement in _requirements():
        if "extra ==" in requirement:
            continue
        name, bounds = _split_requirement(requirement)
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            yield Finding(name=name, ok=False, detail="not installed", remedy=f"pip install '{requirement}'")
            continue
        ok = all(_satisfies(version, operator, bound) for operator, bound in bounds)
        yield Finding(name=name, ok=ok, detail=version, remedy="" if ok else f"pip install '{requirement}'")


def _requirements() -> Sequence[str]:
    """Of the installed package, or of the sources where they run in place."""
    try:
        return metadata.requires("shardwright") or ()
    except metadata.PackageNotFoundError:
        project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        extras = project["optional-dependencies"].items()
        return [*project["dependencies"], *(f"{each}; extra == '{extra}'" for extra, of in extras for each in of)]


def _extras() -> Iterator[Finding]:
    yield from check_extras(_requirements())


def check_extras(requirements: Sequence[str]) -> Iterator[Finding]:
    """Per framework, what is installed of its extra, and whether that was tested. None of it is missing to others."""
    for extra, framework in _FRAMEWORKS.items():
        marked = [item for item in requirements if re.search(rf"extra == ['\"]{extra}['\"]", item)]
        if not marked:
            continue  # an installation from before the extra
        wanted = [item.partition(";")[0].strip() for item in marked]
        install = "pip install " + " ".join(f"'{item}'" for item in wanted)
        findings: list[str] = []
        is_tested = True
        for requirement in marked:
            name, bounds = _split_requirement(requirement.partition(";")[0])
            version = _installed_version(name)
            if version is None:
                findings.append(f"{name} is not installed")
            elif all(_satisfies(version, operator, bound) for operator, bound in bounds):
                findings.append(f"{name} {version}")
            else:
                is_tested = False
                tested = ",".join(sorted((operator + bound for operator, bound in bounds), reverse=True))
                findings.append(f"{name} {version}, outside the tested range {tested}")
        if all(finding.endswith("is not installed") for finding in findings):
            findings = [f"not installed; {framework} users: {install}"]
        yield Finding(name=f"extra [{extra}]", ok=True, detail=", ".join(findings), remedy="" if is_tested else install)


def _installed_version(name: str) -> str | None:
    """Version of a package, or of one that installs a module of this name, such as tensorflow-cpu."""
    for package in (name, *metadata.packages_distributions().get(name, ())):
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return None


def _split_requirement(requirement: str) -> tuple[str, list[tuple[str, str]]]:
    """`pulp<4,>=3.0` → ("pulp", [("<", "4"), (">=", "3.0")])."""
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    name = match[0] if match else requirement
    return name, re.findall(r"(<|>=|==)\s*([0-9][0-9.]*)", requirement[len(name) :])


def _satisfies(version: str, operator: str, bound: str) -> bool:
    have, want = ([int(part) for part in re.findall(r"\d+", text)] for text in (version, bound))
    return {"<": have < want, ">=": have >= want, "==": have == want}[operator]


def _private_names() -> Iterator[Finding]:
    from shardwright.xla import check_platform

    try:
        check_platform()
    except ShardwrightError as error:
        yield Finding(name="jaxlib internals", ok=False, detail=error.message, remedy=error.remedy)
    else:
        yield Finding(name="jaxlib internals", ok=True, detail="every name that is used is there")


def _devices() -> Iterator[Finding]:
    """JAX's devices, listed in a child: a broken driver may abort or hang."""
    code = "import jax; [print(d.platform, d.device_kind) for d in jax.devices()]"
    remedy = "set JAX_PLATFORMS=cpu, or see docs.jax.dev for your accelerator's jax package"
    try:
        child = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=DEVICES_DEADLINE_S, check=False
        )
    except subprocess.TimeoutExpired:
        detail = f"JAX did not answer within {DEVICES_DEADLINE_S:.0f} s"
        yield Finding(name="devices", ok=False, detail=detail, remedy=remedy)
        return
    if child.returncode:
        last = (child.stderr.strip().splitlines() or [f"exit code {child.returncode}"])[-1]
        yield Finding(name="devices", ok=False, detail=last, remedy=remedy)
        return
    kinds = child.stdout.splitlines()
    detail = ", ".join(f"{kinds.count(kind)} × {kind}" for kind in dict.fromkeys(kinds))
    if detail == "1 × cpu cpu":
        detail = "CPU only (a server makes as many CPU devices as asked)"
    yield Finding(name="devices", ok=True, detail=detail)


def _memory() -> Iterator[Finding]:
    import psutil

    memory = psutil.virtual_memory()
    detail = f"{memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB free, {os.cpu_count()} CPU cores"
    ok = memory.available >= COMFORTABLE_MEMORY_BYTES
    yield Finding(name="memory", ok=ok, detail=detail, remedy="" if ok else "free some: the quickstart wants 4 GiB")


def _node_port(node: ClusterNode) -> Finding:
    """A node of this machine has its port free or in use; the master elsewhere has to answer."""
    name = f"task {node.index} {node.address}"
    if _is_here(node):
        detail = "on this machine, port in use" if _answers(node) else "on this machine, port free"
        return Finding(name=name, ok=True, detail=detail)
    if node.index:
        return Finding(name=name, ok=True, detail="on another machine; workers dial, so nothing is asked of it here")
    remedy = "start the master, or check address and firewall"
    return Finding(name=name, ok=False, detail="does not answer", remedy=remedy)


def _master(cluster: Cluster) -> Finding:
    """The self-description of the server behind the master's port."""
    import grpc

    from shardwright.client.credentials import dialer_for
    from shardwright.proto.v1 import master_pb2, master_pb2_grpc

    name = f"task 0 {cluster.master.address}"
    security = cluster.security
    ca = security and (security.ca or security.certificate)
    dialer = dialer_for(cluster.master.address, cluster.token, str(ca) if ca else None)
    with dialer.dial(cluster.master.address) as channel:
        stub = master_pb2_grpc.MasterStub(channel)  # type: ignore[no-untyped-call]
        try:
            status = stub.Status(master_pb2.StatusRequest(), timeout=STATUS_DEADLINE_S, metadata=dialer.metadata)
        except grpc.RpcError as error:
            detail = f"something listens, but not as the file says: {error.code().name} {error.details()}"
            return Finding(name=name, ok=False, detail=detail, remedy="free the port, or use the server's own file")
    nodes = ", ".join(f"task {item.node.index} {item.state}" for item in status.nodes)
    detail = f"server {status.server_version}, jax {status.jax_version}: {status.state} ({nodes})"
    detail += f", {len(status.sessions)} sessions"
    ok = status.state == "ready"
    return Finding(name=name, ok=ok, detail=detail, remedy="" if ok else "start the tasks that are missing")


def _answers(node: ClusterNode) -> bool:
    try:
        with socket.create_connection((node.ip, node.port), timeout=CONNECT_DEADLINE_S):
            return True
    except OSError:
        return False


def _is_here(node: ClusterNode) -> bool:
    """Whether the node's address is one of this machine: only those can be bound."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(node.ip, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True
