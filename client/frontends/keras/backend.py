"""Whether Keras is there, and runs on JAX. Loads Keras only when it is going to."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path

from shardwright.errors import OptionError, PlatformError

_VARIABLE = "KERAS_BACKEND"


def require_jax_backend() -> None:
    """Raises PlatformError without Keras, OptionError when its backend is another than JAX or NNX is on."""
    if importlib.util.find_spec("keras") is None:
        raise PlatformError("Keras is not installed", where="keras", remedy="pip install 'keras>=3.15.1,<3.16'")
    loaded = sys.modules.get("keras")
    backend = loaded.backend.backend() if loaded is not None else _read_configured_backend()
    if backend != "jax":
        raise OptionError(
            f"Keras runs on {backend!r}; its models run on servers as programs of JAX",
            where=_VARIABLE,
            remedy=f"export {_VARIABLE}=jax, or os.environ[{_VARIABLE!r}] = 'jax' before keras is first imported",
        )
    from keras.src.backend.config import is_nnx_enabled

    if is_nnx_enabled():
        raise OptionError(
            "Keras keeps its variables as Flax NNX objects, whose state it moves by itself",
            where="KERAS_NNX_ENABLED",
            remedy="leave KERAS_NNX_ENABLED out, and 'nnx_enabled' of ~/.keras/keras.json",
        )


def _read_configured_backend() -> str:
    """Read the backend that `import keras` takes."""
    if os.environ.get(_VARIABLE):
        return os.environ[_VARIABLE]
    home = Path(os.environ.get("KERAS_HOME") or Path("~/.keras").expanduser())
    try:
        return str(json.loads((home / "keras.json").read_text()).get("backend", "tensorflow"))
    except (OSError, ValueError, AttributeError):
        return "tensorflow"
