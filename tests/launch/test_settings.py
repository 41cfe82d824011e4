"""Options of the command line and of YAML: which wins, and what is said of a bad one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardwright.errors import OptionError
from shardwright.launch.hosts import Host
from shardwright.launch.settings import RunSettings, read_settings
from shardwright.launch.ssh import SshOptions

CONFIG = """\
np: 3
hosts: {a: 2, b: 1}
command: python train.py --name 'two words'
env: {LEARNING_RATE: 0.1, NAME: x}
output-dir: logs
start-timeout: 60
ssh-port: 2200
ssh_option: [HostName=10.0.0.1]
timestamps: true
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.yml"
    path.write_text(CONFIG)
    return path


def test_a_config_gives_every_option(config: Path) -> None:
    assert read_settings({}, config) == RunSettings(
        size=3,
        hosts=(Host(name="a", slots=2), Host(name="b", slots=1)),
        command=("python", "train.py", "--name", "two words"),
        environment={"LEARNING_RATE": "0.1", "NAME": "x"},
        output_dir=Path("logs"),
        start_timeout_s=60.0,
        ssh=SshOptions(port=2200, options=("HostName=10.0.0.1",)),
        timestamps=True,
    )


def test_the_command_line_wins(config: Path, tmp_path: Path) -> None:
    hosts_file = tmp_path / "hosts"
    hosts_file.write_text("c slots=4\n")
    given = {"np": "4", "hosts_file": str(hosts_file), "env": ["NAME=y", "HOME"], "command": ["true"]}
    settings = read_settings(given, config)
    assert (settings.size, settings.hosts, settings.command) == (4, (Host(name="c", slots=4),), ("true",))
    assert settings.environment == {"LEARNING_RATE": "0.1", "NAME": "y", "HOME": str(Path.home())}
    assert settings.start_timeout_s == 60.0


@pytest.mark.parametrize(
    ("flags", "where", "message"),
    [
        ({"np": "0"}, "-np", "'0' is not a whole number from 1"),
        ({"np": "four"}, "-np", "'four' is not a whole number"),
        ({"np": "-2"}, "-np", "'-2' is not"),
        ({"start_timeout": "soon"}, "--start-timeout", "'soon' is not a number of seconds"),
        ({"grace": "nan"}, "--grace", "'nan' is not a number of seconds"),
        ({"ssh_port": "65536"}, "--ssh-port", "'65536' is not a whole number from 1 to 65535"),
        ({"ssh_option": ["oops"]}, "--ssh-option", "'oops' is not Name=value"),
        ({"hosts": "a:b"}, "-H", "'b' is no number of slots"),
        ({"env": ["NO_SUCH_VARIABLE_HERE"]}, "--env", "'NO_SUCH_VARIABLE_HERE' is not set here"),
        ({"env": ["1x=2"]}, "--env", "'1x' is no name"),
        ({"coordinator_address": "10.0.0.1:70000"}, "--coordinator-address", "is not an address"),
        ({"coordinator_address": "a:b"}, "--coordinator-address", "is not an address"),
        ({"output_dir": ""}, "--output-dir", "'' is not a text"),
        ({"hosts": "a", "hosts_file": "/dev/null"}, "--hosts-file", "names no host"),
    ],
)
def test_a_bad_value_names_its_flag(flags: dict[str, Any], where: str, message: str) -> None:
    with pytest.raises(OptionError, match=message) as raised:
        read_settings(flags)
    assert raised.value.where == where


@pytest.mark.parametrize(
    ("text", "where", "message"),
    [
        ("np: 2\noutput_dirs: x\n", "run.yml:2: output_dirs", "no option is called so"),
        ("np: four\n", "run.yml:1: np", "'four' is not a whole number"),
        ("np: true\n", "run.yml:1: np", "True is not a whole number"),
        ("np: 2\n\ntimestamps: 1\n", "run.yml:3: timestamps", "1 is not true or false"),
        ("hosts: [a:2, a:3]\n", "run.yml:1: hosts", "'a' is named twice"),
        ("env: [1]\n", "run.yml:1: env", "1 is not a text"),
        ("env: {A: [1]}\n", "run.yml:1: env.A", "is not a text or a number"),
        ('command: "python \'x"\n', "run.yml:1: command", "unreadable command"),
        ("np: [\n", "run.yml:2:1", "not valid YAML"),
        ("- np\n", "run.yml", "expected `option: value` lines"),
        ("start-timeout: 1\nstart_timeout: 2\n", "run.yml:2: start_timeout", "given twice"),
        ("np: 1\nnp: 2\n", "run.yml:2:1", "key 'np' appears twice"),
        ("hosts: a\nhosts-file: b\n", "run.yml:2: hosts-file", "b cannot be read"),
    ],
)
def test_a_bad_config_names_line_and_key(text: str, where: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yml"
    path.write_text(text)
    with pytest.raises(OptionError, match=message) as raised:
        read_settings({}, path)
    assert raised.value.where == str(tmp_path / where)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("node", ("node", 0)),
        ("10.0.0.1:6000", ("10.0.0.1", 6000)),
        ("[fe80::1]:7", ("fe80::1", 7)),
        ("::1", ("::1", 0)),
    ],
)
def test_an_address_may_have_a_port(text: str, address: tuple[str, int]) -> None:
    assert read_settings({"coordinator_address": text}).coordinator_address == address


def test_an_unknown_key_gets_the_nearest(tmp_path: Path) -> None:
    path = tmp_path / "run.yml"
    path.write_text("output_dirs: x\n")
    with pytest.raises(OptionError) as raised:
        read_settings({}, path)
    assert raised.value.remedy == "did you mean 'output-dir'?"


def test_a_missing_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="cannot be read") as raised:
        read_settings({}, tmp_path / "none.yml")
    assert raised.value.where == str(tmp_path / "none.yml")


def test_an_empty_config_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "run.yml"
    path.write_text("# later\n")
    assert read_settings({"np": "2"}, path) == read_settings({"np": "2"})


def test_options_of_an_elastic_job(tmp_path: Path) -> None:
    path = tmp_path / "run.yml"
    path.write_text("min-np: 2\nmax-np: 4\nhosts: a:4\nhang-timeout: 9\nhost-cooldown: 60\n")
    settings = read_settings({"host_failures": "5"}, path)
    assert settings.is_elastic
    assert (settings.min_size, settings.max_size, settings.hang_timeout_s) == (2, 4, 9.0)
    assert (settings.host_failures, settings.host_cooldown_s, settings.elastic_timeout_s) == (5, 60.0, 600.0)
    assert not read_settings({"np": "4"}).is_elastic


@pytest.mark.parametrize(
    ("flags", "where", "message"),
    [
        ({"min_np": "4", "max_np": "2"}, "--max-np", "below --min-np 4"),
        ({"min_np": "4", "np": "2"}, "-np", "below --min-np 4"),
        ({"min_np": "1"}, "--max-np", "how many ranks at most"),
        ({"host_discovery_script": "x.sh", "hosts": "a"}, "--host-discovery-script", "named twice"),
        ({"np": "2", "hang_timeout": "5"}, "--hang-timeout", "an option of elastic jobs"),
        ({"min_np": "0"}, "--min-np", "whole number from 1"),
    ],
)
def test_options_of_elastic_jobs_that_make_no_sense_are_named(flags: dict[str, str], where: str, message: str) -> None:
    with pytest.raises(OptionError, match=message) as caught:
        read_settings(flags)
    assert caught.value.where == where
