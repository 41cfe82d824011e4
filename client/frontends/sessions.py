"""The session that a front end is given."""

from __future__ import annotations

from typing import Any

from shardwright.errors import OptionError


def require_session(session: Any) -> None:
    """Raises OptionError on what is no session, SessionError on a closed one."""
    from shardwright.client.session import Session

    if not isinstance(session, Session):
        raise OptionError(
            f"session is a {type(session).__name__}", where="session", remedy="pass what shardwright.connect() returns"
        )
    session._state.cluster.require_open()
