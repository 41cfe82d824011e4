"""A network of its own for each node of a cluster, where packets may be dropped: namespaces behind a bridge (Linux)."""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess


class NodeNetwork:
    """Node n has the address `address_of(n)` in a namespace of its own; this process reaches all of them.

    Only root may make one, where the kernel allows it: see `is_possible`.
    """

    def __init__(self, nodes: int) -> None:
        self._name = f"sw{os.getpid() % 100_000}"
        self._subnet = f"10.213.{os.getpid() % 256}"
        self._nodes = nodes
        atexit.register(self.close)
        _ip("link", "add", self._name, "type", "bridge")
        _ip("addr", "add", f"{self._subnet}.1/24", "dev", self._name)
        _ip("link", "set", self._name, "up")
        for node in range(nodes):
            self._add(node)

    @staticmethod
    def is_possible() -> bool:
        if os.getuid() or shutil.which("ip") is None:
            return False
        try:
            NodeNetwork(1).close()
        except subprocess.CalledProcessError:
            return False
        return True

    def _add(self, node: int) -> None:
        space, outer = self._space(node), self._cable(node)
        _ip("netns", "add", space)
        _ip("link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", space)
        _ip("link", "set", outer, "master", self._name, "up")
        _ip("-n", space, "addr", "add", f"{self.address_of(node)}/24", "dev", "eth0")
        _ip("-n", space, "link", "set", "eth0", "up")
        _ip("-n", space, "link", "set", "lo", "up")

    def address_of(self, node: int) -> str:
        return f"{self._subnet}.{node + 2}"

    def command(self, node: int) -> list[str]:
        """What to put before a command that runs on the node."""
        return ["nsenter", f"--net=/run/netns/{self._space(node)}"]

    def cut(self, node: int) -> None:
        """From now on, packets from and to the node are lost; no connection hears of it."""
        _ip("link", "set", self._cable(node), "down")

    def mend(self, node: int) -> None:
        _ip("link", "set", self._cable(node), "up")

    def close(self) -> None:
        """Takes all of it away; may be called again."""
        atexit.unregister(self.close)
        for node in range(self._nodes):
            _ip("link", "delete", self._cable(node), check=False)  # a namespace ends with its last process only
            _ip("netns", "delete", self._space(node), check=False)
        _ip("link", "delete", self._name, check=False)

    def _space(self, node: int) -> str:
        return f"{self._name}-{node}"

    def _cable(self, node: int) -> str:
        return f"{self._name}v{node}"


def _ip(*arguments: str, check: bool = True) -> None:
    subprocess.run(["ip", *arguments], check=check, capture_output=True)
