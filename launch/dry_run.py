"""A job as text, without running it: commands of hosts and processes, and their variables without secrets."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from shardwright.launch.job import Job, ProcessSpec, mask_secret
from shardwright.launch.launcher import ssh_of
from shardwright.launch.node import node_command
from shardwright.launch.ssh import SshOptions


def describe_job(job: Job, ssh: SshOptions, start_timeout_s: float) -> str:
    """Hosts with the command of their agent, then their processes. Secret values are `***`."""
    lines = []
    for host in job.hosts:
        host_ssh = ssh_of(host, ssh)
        text = "this machine" if host_ssh is None else shlex.join(node_command(host, host_ssh, start_timeout_s))
        lines += [f"host {host.name}: {text}", f"  in {job.directory}"]
        for process in job.processes:
            if process.host.name == host.name:
                lines += _describe_process(job, process, local=host_ssh is None)
    return "\n".join(lines)


def _describe_process(job: Job, process: ProcessSpec, *, local: bool) -> list[str]:
    own = _describe_variables({**job.environment, **process.environment})
    everything = job.variables(process, local=local)
    rest = {name: value for name, value in everything.items() if name not in {**job.environment, **process.environment}}
    return [
        f"  {process.description}: {shlex.join(process.command)}",
        *(f"    {line}" for line in own),
        *(f"    {line}  (as here)" for line in _describe_variables(rest)),
    ]


def _describe_variables(variables: Mapping[str, str]) -> list[str]:
    return [f"{name}={shlex.quote(mask_secret(name, value))}" for name, value in variables.items()]
