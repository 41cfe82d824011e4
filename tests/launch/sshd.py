"""An ssh server on loopback, for one test module: hosts that are not this machine by name, and are by address."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.launch.jobs import MARK

_SBIN = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"])
SSHD = shutil.which("sshd", path=_SBIN)

needs_sshd = pytest.mark.skipif(
    SSHD is None or shutil.which("ssh") is None, reason="needs sshd: apt-get install openssh-server"
)


@dataclass(frozen=True, kw_only=True)
class SshServer:
    """port: on 127.0.0.1. folder: of its keys."""

    port: int
    folder: Path

    @property
    def flags(self) -> list[str]:
        """Options of `shardwright run` that bring every host name here."""
        options = ["HostName=127.0.0.1", "IdentitiesOnly=yes", f"SendEnv={MARK}"]
        options += [f"UserKnownHostsFile={self.folder / 'known_hosts'}", "HostKeyAlias=loopback"]
        words = ["--ssh-port", str(self.port), "--ssh-identity", str(self.folder / "user_key")]
        return words + [word for option in options for word in ("--ssh-option", option)]


@contextlib.contextmanager
def ssh_server(folder: Path) -> Iterator[SshServer]:
    """Runs as this user, takes one key, and ends with the block. Skips the test where it cannot run."""
    assert SSHD is not None
    for name in ("host_key", "user_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    shutil.copy(folder / "user_key.pub", folder / "authorized_keys")
    (folder / "known_hosts").write_text("loopback " + (folder / "host_key.pub").read_text())
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (folder / "sshd_config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host_key\n"
        f"AuthorizedKeysFile {folder}/authorized_keys\n"
        f"StrictModes no\nUsePAM no\nPidFile none\nPasswordAuthentication no\nPermitRootLogin yes\nAcceptEnv {MARK}\n"
        f"SetEnv HOME={folder}\n"  # no startup files of whoever runs the tests
    )
    with (folder / "sshd.log").open("wb") as log:
        server = subprocess.Popen([SSHD, "-D", "-e", "-f", str(folder / "sshd_config")], stderr=log)
        try:
            if not _listens(server, port):
                pytest.skip(f"sshd does not run here: {(folder / 'sshd.log').read_text().strip()}")
            yield SshServer(port=port, folder=folder)
        finally:
            server.kill()
            server.wait()


def _listens(server: subprocess.Popen[bytes], port: int) -> bool:
    until = time.monotonic() + 10
    while server.poll() is None and time.monotonic() < until:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return True
        time.sleep(0.05)
    return False
