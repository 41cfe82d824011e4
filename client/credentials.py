"""What a client shows to a server: the token it was given, or on this machine the one of its own user."""

from __future__ import annotations

import os
from urllib.parse import urlsplit

from shardwright.client.connection import Dialer
from shardwright.clusters.cluster import is_loopback
from shardwright.clusters.listeners import belongs_to_others
from shardwright.clusters.local_token import read_token


def dialer_for(address: str, token: str | None = None, ca_file: str | None = None) -> Dialer:
    """For calls of the server at `host:port`.

    Args:
      token: default `$SHARDWRIGHT_TOKEN`; for a server on this machine without that, the token of this user's servers
        at its port (see `shardwright/clusters/local_token.py`).
      ca_file: trusted certificates; default `$SHARDWRIGHT_CA`.

    Raises OptionError: a wrong `$SHARDWRIGHT_CA`. AuthenticationError: the local token cannot be read, or others can.
    """
    token = token or os.environ.get("SHARDWRIGHT_TOKEN") or _local_token(address)
    return Dialer(token, ca_file or os.environ.get("SHARDWRIGHT_CA"))


def _local_token(address: str) -> str | None:
    at = urlsplit(f"//{address}")
    host, port = at.hostname or "", at.port or 0
    if not is_loopback(host) or belongs_to_others(host, port):
        return None
    return read_token(port)
