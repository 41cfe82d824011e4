"""The user's settings: options of the command line over those of a YAML file, each checked once."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwright.errors import OptionError
from shardwright.input_files import read_input_text
from shardwright.json_reader import JsonProblem, format_value
from shardwright.launch import peer_options
from shardwright.launch.hosts import Host, parse_hosts, read_hosts_file
from shardwright.launch.ssh import SshOptions
from shardwright.launch.tuning import (
    DEFAULT_ELASTIC_TIMEOUT_S,
    DEFAULT_GRACE_S,
    DEFAULT_HANG_TIMEOUT_S,
    DEFAULT_START_TIMEOUT_S,
)
from shardwright.spelling import did_you_mean

_VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SSH_OPTION = re.compile(r"[A-Za-z]+[= ].+")
_MAX_SIZE = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """Settings of `shardwright run`.

    size: None for all slots. hosts: empty for this machine alone. coordinator_address: host and port, 0 for any; None
    for this machine's address on the way to the other hosts. min_size, max_size, discovery_script: of an elastic job,
    which one of them makes; the options below them are for such jobs alone. timeline: a file of the ranks' collectives.
    stall_warning_s, stall_shutdown_s: seconds that a collective may wait until a warning, and until the job's end.
    slots_per_host: of hosts whose script or file says none. notes: lines for the user, of options without effect.
    """

    size: int | None = None
    hosts: tuple[Host, ...] = ()
    command: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    ssh: SshOptions = field(default_factory=SshOptions)
    output_dir: Path | None = None
    start_timeout_s: float = DEFAULT_START_TIMEOUT_S
    grace_s: float = DEFAULT_GRACE_S
    coordinator_address: tuple[str, int] | None = None
    timestamps: bool = False
    verbose: bool = False
    timeline: Path | None = None
    stall_warning_s: float | None = None
    stall_shutdown_s: float | None = None
    min_size: int | None = None
    max_size: int | None = None
    discovery_script: Path | None = None
    hosts_file: Path | None = None
    hang_timeout_s: float = DEFAULT_HANG_TIMEOUT_S
    elastic_timeout_s: float = DEFAULT_ELASTIC_TIMEOUT_S
    host_failures: int = 3
    host_cooldown_s: float | None = None
    reset_limit: int | None = None
    slots_per_host: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def is_elastic(self) -> bool:
        """Whether ranks may come and go."""
        return not (self.min_size is None and self.max_size is None and self.discovery_script is None)


def read_settings(flags: Mapping[str, Any], config: Path | None = None, notes: tuple[str, ...] = ()) -> RunSettings:
    """Read the settings: the command line's `flags` by name, over those of a YAML file, ours or Horovod's.

    Raises OptionError with the flag, or with the file, the line and the key.
    """
    values, file_notes = _read_config(config) if config else ({}, ())
    given_values = {name: _OPTIONS[name].parse(value, _OPTIONS[name].flag) for name, value in flags.items()}
    if {"hosts", "hosts_file"} <= given_values.keys():
        raise OptionError("-H and --hosts-file name the hosts twice", where="--hosts-file", remedy="give one of them")
    if {"hosts", "hosts_file"} & given_values.keys():
        values = {name: value for name, value in values.items() if name not in ("hosts", "hosts_file")}
    environment = {**values.get("env", {}), **given_values.get("env", {})}
    values = {**values, **given_values, "env": environment}
    ssh = SshOptions(
        port=values.pop("ssh_port", None),
        identity=values.pop("ssh_identity", None),
        options=values.pop("ssh_option", ()),
    )
    hosts_file, hosts_in_file = values.pop("hosts_file", (None, ()))
    hosts = values.pop("hosts", ()) or hosts_in_file
    values = {_OPTIONS[name].attribute or name: value for name, value in values.items()}
    settings = RunSettings(hosts=hosts, ssh=ssh, hosts_file=hosts_file, notes=(*file_notes, *notes), **values)
    _check_elastic(settings, values.keys())
    return settings


def _check_elastic(settings: RunSettings, names: Collection[str]) -> None:
    """Raises OptionError for options of elastic jobs in another, and for sizes and hosts that exclude each other."""
    if not settings.is_elastic:
        for name, option in _OPTIONS.items():
            if option.elastic and (option.attribute or name) in names:
                raise OptionError("this is an option of elastic jobs", where=option.flag, remedy="give --min-np, too")
        return
    if settings.discovery_script and settings.hosts:
        raise OptionError(
            "the hosts are named twice", where="--host-discovery-script", remedy="leave out -H and --hosts-file"
        )
    least, most = settings.min_size or 1, settings.max_size or settings.size
    if most is not None and most < least:
        where = "--max-np" if settings.max_size else "-np"
        raise OptionError(f"{most} is below --min-np {least}", where=where, remedy=f"give at least {least}")
    if most is None and not settings.hosts and not settings.discovery_script:
        raise OptionError(
            "how many ranks at most?", where="--max-np", remedy="give --max-np, hosts (-H), or --host-discovery-script"
        )


def _read_config(path: Path) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Parse the options of a YAML file, by name; lines for the user. Raises OptionError."""
    from shardwright.clusters.yaml_text import load_yaml  # PyYAML, for those who write it

    try:
        config = load_yaml(read_input_text(path))
    except OSError as error:
        raise OptionError(f"cannot be read ({error.strerror})", where=str(path), remedy="check --config") from None
    except UnicodeDecodeError:
        raise OptionError("not valid YAML: not UTF-8 text", where=str(path), remedy="save it as UTF-8") from None
    except JsonProblem as problem:
        place = f"{path}:{problem.line}:{problem.column}" if problem.line else str(path)
        raise OptionError(f"not valid YAML: {problem.message}", where=place, remedy="mend the file there") from None
    if config.data is None:
        return {}, ()
    if not isinstance(config.data, dict):
        raise OptionError("expected `option: value` lines", where=str(path), remedy="write for example `np: 4`")
    values: dict[str, Any] = {}
    of_horovod: dict[str, Any] = {}
    for key, value in config.data.items():
        name = key.replace("-", "_")
        where = f"{path}:{config.line((key,))}: {key}"
        if peer_options.is_horovod_section(name, value):
            of_horovod |= peer_options.read_section(name, value, where)
            continue
        if name not in _OPTIONS:
            names = [option.replace("_", "-") for option in _OPTIONS]
            remedy = did_you_mean(str(key), names) or f"the options are {', '.join(names)}"
            raise OptionError("no option is called so", where=where, remedy=remedy)
        if name in values:
            raise OptionError("the option is given twice", where=where, remedy="give it once")
        values[name] = _OPTIONS[name].parse(value, where)
    if {"hosts", "hosts_file"} <= values.keys():
        raise OptionError("hosts and hosts-file name the hosts twice", where=str(path), remedy="give one of them")
    translation = peer_options.read_file_options(of_horovod, path)
    for name, value in translation.values.items():
        values[name] = _OPTIONS[name].parse(value, f"{path}: {name}")
    values["env"] = {**translation.environment, **values.get("env", {})}
    return values, translation.notes


# ---- parsers: of a text of the command line, or a value of YAML ----------------------------
def _make_error(value: Any, where: str, expected: str) -> OptionError:
    return OptionError(f"{format_value(value)} is not {expected}", where=where, remedy=f"give {expected}")


def _make_integer_parser(minimum: int, maximum: int) -> Callable[[Any, str], int]:
    def parse(value: Any, where: str) -> int:
        text = str(value) if type(value) in (int, str) else ""
        if not re.fullmatch(r"\d{1,9}", text) or not minimum <= int(text) <= maximum:
            raise _make_error(value, where, f"a whole number from {minimum} to {maximum}")
        return int(text)

    return parse


def _parse_seconds(value: Any, where: str) -> float:
    text = str(value) if type(value) in (int, float, str) else ""
    if not re.fullmatch(r"\d{1,9}(\.\d*)?|\.\d+", text):
        raise _make_error(value, where, "a number of seconds from 0")
    return float(text)


def _parse_bool(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise _make_error(value, where, "true or false")
    return value


def _parse_text(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise _make_error(value, where, "a text")
    return value


def _parse_address(value: Any, where: str) -> tuple[str, int]:
    """Parse `host`, `host:port` or `[host]:port`; the port is 0 by default."""
    match = re.fullmatch(
        r"(?:\[([^\[\]]+)\]|([^:\[\]]+))(?::(\d{1,5}))?|([0-9a-fA-F.]*:[0-9a-fA-F.]*:[0-9a-fA-F:.]*)",
        _parse_text(value, where),
    )
    if match is None or int(match[3] or 0) > 65535:
        raise _make_error(value, where, "an address, or an address and a port: 10.0.0.1:6000")
    return match[1] or match[2] or match[4], int(match[3] or 0)


def _parse_path(value: Any, where: str) -> Path:
    return Path(_parse_text(value, where)).expanduser()


def _parse_hosts(value: Any, where: str) -> tuple[Host, ...]:
    if isinstance(value, dict):
        value = [f"{name}:{slots}" for name, slots in value.items()]
    if isinstance(value, list) and value:
        value = ",".join(map(str, value))
    return parse_hosts(_parse_text(value, where), where)


def _parse_hosts_file(value: Any, where: str) -> tuple[Path, tuple[Host, ...]]:
    path = _parse_path(value, where)
    return path, read_hosts_file(path, where)


def _parse_ssh_options(value: Any, where: str) -> tuple[str, ...]:
    items = [value] if isinstance(value, str) else value
    if isinstance(items, dict):
        items = [f"{name}={word}" for name, word in items.items()]
    if not isinstance(items, list):
        raise _make_error(value, where, "Name=value as in ssh_config")
    for item in items:
        if not isinstance(item, str) or not _SSH_OPTION.fullmatch(item):
            raise _make_error(item, where, "Name=value as in ssh_config")
    return tuple(items)


def _parse_environment(value: Any, where: str) -> dict[str, str]:
    """Parse `NAME=VALUE`, or `NAME` for the launcher's own value; in YAML also `NAME: value`."""
    if isinstance(value, dict):
        pairs = [(str(name), _parse_scalar(item, f"{where}.{name}")) for name, item in value.items()]
    elif isinstance(value, list):
        pairs = [_parse_variable(_parse_text(item, where), where) for item in value]
    else:
        raise _make_error(value, where, "NAME: value lines")
    for name, _ in pairs:
        if not _VARIABLE_NAME.fullmatch(name):
            raise OptionError(f"{name!r} is no name of a variable", where=where, remedy="write NAME=VALUE")
    return dict(pairs)


def _parse_variable(item: str, where: str) -> tuple[str, str]:
    name, equals, value = item.partition("=")
    if equals:
        return name, value
    if name not in os.environ:
        raise OptionError(f"the variable {name!r} is not set here", where=where, remedy=f"write {name}=VALUE")
    return name, os.environ[name]


def _parse_scalar(value: Any, where: str) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise _make_error(value, where, "a text or a number (quote true and false)")
    return str(value)


def _parse_command(value: Any, where: str) -> tuple[str, ...]:
    try:
        words = shlex.split(value) if isinstance(value, str) else value
    except ValueError as error:
        raise OptionError(f"unreadable command: {error}", where=where, remedy="close the quotes") from None
    if not isinstance(words, list) or not words or not all(isinstance(word, str) for word in words):
        raise _make_error(value, where, "a command, or a list of its words")
    return tuple(words)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Option:
    """An option: its flag, its parser, and its attribute of RunSettings (default: the option's own name).

    elastic: only for elastic jobs.
    """

    flag: str
    parse: Callable[[Any, str], Any]
    attribute: str = ""
    elastic: bool = False


_OPTIONS: dict[str, _Option] = {
    "np": _Option(flag="-np", parse=_make_integer_parser(1, _MAX_SIZE), attribute="size"),
    "hosts": _Option(flag="-H", parse=_parse_hosts),
    "hosts_file": _Option(flag="--hosts-file", parse=_parse_hosts_file),
    "command": _Option(flag="COMMAND", parse=_parse_command),
    "env": _Option(flag="--env", parse=_parse_environment, attribute="environment"),
    "output_dir": _Option(flag="--output-dir", parse=_parse_path),
    "start_timeout": _Option(flag="--start-timeout", parse=_parse_seconds, attribute="start_timeout_s"),
    "grace": _Option(flag="--grace", parse=_parse_seconds, attribute="grace_s"),
    "coordinator_address": _Option(flag="--coordinator-address", parse=_parse_address),
    "ssh_port": _Option(flag="--ssh-port", parse=_make_integer_parser(1, 65535)),
    "ssh_identity": _Option(flag="--ssh-identity", parse=_parse_path),
    "ssh_option": _Option(flag="--ssh-option", parse=_parse_ssh_options),
    "timestamps": _Option(flag="--timestamps", parse=_parse_bool),
    "verbose": _Option(flag="--verbose", parse=_parse_bool),
    "timeline": _Option(flag="--timeline", parse=_parse_path),
    "stall_warning": _Option(flag="--stall-warning", parse=_parse_seconds, attribute="stall_warning_s"),
    "stall_shutdown": _Option(flag="--stall-shutdown", parse=_parse_seconds, attribute="stall_shutdown_s"),
    "min_np": _Option(flag="--min-np", parse=_make_integer_parser(1, _MAX_SIZE), attribute="min_size"),
    "max_np": _Option(flag="--max-np", parse=_make_integer_parser(1, _MAX_SIZE), attribute="max_size"),
    "host_discovery_script": _Option(flag="--host-discovery-script", parse=_parse_path, attribute="discovery_script"),
    "hang_timeout": _Option(flag="--hang-timeout", parse=_parse_seconds, attribute="hang_timeout_s", elastic=True),
    "elastic_timeout": _Option(
        flag="--elastic-timeout", parse=_parse_seconds, attribute="elastic_timeout_s", elastic=True
    ),
    "host_failures": _Option(flag="--host-failures", parse=_make_integer_parser(1, _MAX_SIZE), elastic=True),
    "host_cooldown": _Option(flag="--host-cooldown", parse=_parse_seconds, attribute="host_cooldown_s", elastic=True),
    "slots_per_host": _Option(flag="--slots-per-host", parse=_make_integer_parser(1, _MAX_SIZE)),
    "reset_limit": _Option(flag="--reset-limit", parse=_make_integer_parser(0, _MAX_SIZE), elastic=True),
}

#: Names of all options, the keys of `read_settings`.
OPTION_NAMES: Collection[str] = _OPTIONS.keys()
