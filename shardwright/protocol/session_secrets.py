"""A session's id is a hash of its secret, so that every server can tell who holds the session, and keeps nothing.

    id = first 128 bits of SHA-256(secret), hexadecimal

The id is no key: it may stand in `Status`, in logs and in files. The secret travels in the metadata of calls.

The secret of a session with a name is made from the token that it is opened with, so that another process with that
token gets it again, and no server has to keep it:

    secret = HMAC-SHA-256(token, salt, name)

The salt is the session's own. It is no key either.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
from collections.abc import Iterable
from typing import Any

#: Metadata of each call that names a session.
SESSION_KEY = "shardwright-session"

#: Characters of a session's name, at most.
MAX_NAME = 200

_SECRET_BYTES, _SALT_BYTES = 32, 16
_ID_DIGITS = 32


def new_secret() -> str:
    """256 random bits, printable."""
    return secrets.token_urlsafe(_SECRET_BYTES)


def new_salt() -> str:
    """128 random bits, printable."""
    return secrets.token_urlsafe(_SALT_BYTES)


def named_secret(token: str, salt: str, name: str) -> str:
    """The secret of a session with a name; token: "" where the call carries none."""
    digest = hmac.digest(token.encode(), f"{salt}\0{name}".encode(), "sha256")
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")


def is_name(name: str) -> bool:
    """Whether a session may have this name."""
    return 0 < len(name) <= MAX_NAME and name.isprintable()


def id_of(secret: str) -> str:
    """The id of the session that this secret opens."""
    return hashlib.sha256(secret.encode()).hexdigest()[:_ID_DIGITS]


def session_metadata(secret: str) -> tuple[tuple[str, str], ...]:
    """What a call carries besides the token."""
    return ((SESSION_KEY, secret),)


def value_of(metadata: Iterable[Any] | None, key: str) -> str:
    """The value of a key in a call's metadata; empty without one."""
    return next((str(value) for name, value in metadata or () if name == key), "")


def opens(metadata: Iterable[Any] | None, session_id: str) -> bool:
    """Whether a call carries the secret of this session, be there one or not. Takes the same time either way."""
    secret = value_of(metadata, SESSION_KEY)
    return hmac.compare_digest(id_of(secret).encode(), session_id.encode()) and bool(secret)
