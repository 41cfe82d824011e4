"""Programs as the master keeps them: compressed, and read in slices, whatever they unpack to."""

from __future__ import annotations

import codecs
import hashlib
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from shardwright.errors import HloSyntaxError, ResourceLimitError
from shardwright.server.tuning import SLICE_BYTES

_GZIP = 31  # zlib's window bits


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredProgram:
    """HLO text. gzip: as it came. program_id: SHA-256 of the text, hexadecimal."""

    program_id: str
    gzip: bytes
    text_bytes: int

    def text(self) -> str:
        """Blocking; takes seconds for a gigabyte."""
        return unpack_program(self.gzip)


def unpack_program(packed: bytes) -> str:
    """The text of a `StoredProgram.gzip`."""
    return zlib.decompress(packed, _GZIP).decode()


class IncomingProgram:
    """A program on its way. `feed` and `finish` block for as long as it takes to unpack: call them beside the loop.

    They raise ResourceLimitError past `limit_bytes` of text, HloSyntaxError on anything but gzip-compressed UTF-8.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._parts: list[bytes] = []
        self._text_bytes = 0
        self._hash = hashlib.sha256()
        self._inflater = zlib.decompressobj(_GZIP)
        self._decoder = codecs.getincrementaldecoder("utf-8")()

    def feed(self, chunk: bytes) -> None:
        for part in self._slices(chunk):
            self._text_bytes += len(part)
            if self._text_bytes > self._limit_bytes:
                raise ResourceLimitError(
                    f"text is over the limit of {self._limit_bytes >> 20} MiB",
                    where="program",
                    remedy="hoist large constants into arguments",
                )
            self._hash.update(part)
            self._decode(part, is_last=False)
        self._parts.append(chunk)

    def finish(self) -> StoredProgram:
        if not self._inflater.eof:
            raise HloSyntaxError("the compressed text ends early", where="program")
        self._decode(b"", is_last=True)
        return StoredProgram(program_id=self._hash.hexdigest(), gzip=b"".join(self._parts), text_bytes=self._text_bytes)

    def _slices(self, chunk: bytes) -> Iterator[bytes]:
        while chunk:
            if self._inflater.eof:
                raise HloSyntaxError(f"{len(chunk)} bytes after the compressed text", where="program")
            try:
                yield self._inflater.decompress(chunk, SLICE_BYTES)
            except zlib.error as error:
                raise HloSyntaxError(f"not gzip-compressed: {error}", where="program") from None
            chunk = self._inflater.unconsumed_tail or self._inflater.unused_data

    def _decode(self, part: bytes, *, is_last: bool) -> None:
        try:
            self._decoder.decode(part, is_last)
        except UnicodeDecodeError as error:
            raise HloSyntaxError(f"not UTF-8: {error.reason}", where="program") from None
