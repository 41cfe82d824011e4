"""Messages between the compile service and its child: a JSON header and byte blobs over a pipe.

A frame is the header's length (4 bytes, big-endian), the header as UTF-8 JSON
with the blobs' lengths under `"blobs"`, then the blobs. Nothing is unpickled.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO

_LENGTH = struct.Struct(">I")

Header = dict[str, Any]


def write_message(stream: BinaryIO, header: Header, blobs: Sequence[bytes] = ()) -> None:
    """Write one frame and flush; OSError where the other side is gone."""
    text = json.dumps({**header, "blobs": [len(blob) for blob in blobs]}).encode()
    stream.write(_LENGTH.pack(len(text)))
    stream.write(text)
    for blob in blobs:
        stream.write(blob)
    stream.flush()


def read_message(receive: Callable[[int], bytes]) -> tuple[Header, list[bytes]] | None:
    """Read one frame with `receive(n)`, which gives exactly n bytes, or fewer at the end; None at the end."""
    prefix = receive(_LENGTH.size)
    if len(prefix) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(prefix)
    text = receive(length)
    if len(text) < length:
        return None
    header = json.loads(text)
    blobs = []
    for size in header.pop("blobs"):
        blob = receive(size)
        if len(blob) < size:
            return None
        blobs.append(blob)
    return header, blobs
