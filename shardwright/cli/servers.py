"""The server that a command asks: its address, token and certificate, and calls of its master."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from shardwright.cli.tuning import DEADLINE_S
from shardwright.errors import OptionError

if TYPE_CHECKING:
    import grpc


def add_address(parser: argparse.ArgumentParser, *, is_required: bool = False) -> None:
    """The argument HOST:PORT, first of a command."""
    if is_required:
        parser.add_argument("address", metavar="HOST:PORT", help="of the server's master")
    else:
        parser.add_argument("address", metavar="HOST:PORT", nargs="?", help="default: $SERVER_IP and $SERVER_PORT")


def address_of(text: str | None) -> str:
    """Raises OptionError where there is none."""
    from shardwright.client.addresses import address_from_environment, read_address

    address = address_from_environment() if text is None else read_address(text)
    if address is None:
        raise OptionError("no address", remedy="give HOST:PORT, or set SERVER_IP and SERVER_PORT")
    return address


@contextmanager
def dialed(address: str) -> Iterator[tuple[grpc.Channel, tuple[tuple[str, str], ...], float]]:
    """(channel, metadata of calls, seconds that a call may take), with the credentials that connect() takes."""
    from shardwright.client.credentials import dialer_for

    dialer = dialer_for(address)
    with dialer.dial(address) as channel:
        yield channel, dialer.metadata, DEADLINE_S


def call_master(address: str, method: str, request: Any) -> Any:
    """The reply to a call of the Master service. Raises our errors."""
    from shardwright.proto.v1 import master_pb2_grpc

    return _call(address, master_pb2_grpc.MasterStub, method, request)


def call_operators(address: str, method: str, request: Any) -> Any:
    """The reply to a call of the Operators service. Raises our errors."""
    from shardwright.proto.v1 import operators_pb2_grpc

    return _call(address, operators_pb2_grpc.OperatorsStub, method, request)


def _call(address: str, stub: Callable[[grpc.Channel], Any], method: str, request: Any) -> Any:
    import grpc

    from shardwright.protocol import wire

    with dialed(address) as (channel, metadata, deadline_s):
        try:
            return getattr(stub(channel), method)(request, timeout=deadline_s, metadata=metadata)
        except grpc.RpcError as error:
            wire.raise_from_rpc(error, where=address)
