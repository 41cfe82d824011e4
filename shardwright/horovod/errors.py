"""What Horovod's users catch: a collective that fails is a RuntimeError, a wrong argument a ValueError."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from shardwright.errors import CollectiveError, OptionError

#: Raised by collectives that fail, of one rank's fault or the network's: `sw.CollectiveError`, a RuntimeError.
HorovodInternalError = CollectiveError


class OptionValueError(OptionError, ValueError):
    """An OptionError that is a ValueError as well."""


@contextlib.contextmanager
def as_value_errors() -> Iterator[None]:
    """An OptionError in the block is a ValueError outside."""
    try:
        yield
    except OptionValueError:
        raise
    except OptionError as error:
        raise OptionValueError(error.message, where=error.where, remedy=error.remedy) from error
