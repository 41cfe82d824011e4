"""Eight CPU devices for every test, set before anything imports JAX; nothing is answered from plans of other runs."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import sys
import tempfile

_DEVICES = "--xla_force_host_platform_device_count"

os.environ["JAX_PLATFORMS"] = "cpu"
if _DEVICES not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICES}=8".strip()
os.environ["SHARDWRIGHT_CACHE"] = "off"
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # or each of a thousand processes would compile every module again
sys.dont_write_bytecode = False
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="shardwright-state-")  # tokens of the servers that tests start
atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)

for _signal, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_signal) is signal.SIG_IGN:  # what a shell has put in the background hears no Ctrl-C
        signal.signal(_signal, _handler)
