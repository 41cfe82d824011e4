"""Eight CPU devices for every test, set before anything imports JAX; nothing is answered from plans of other runs.

LLVM optimizes nothing: XLA's own passes are the same, and programs this small compile in less than half of the time.
"""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import sys
import tempfile

_XLA_FLAGS = {"xla_force_host_platform_device_count": 8, "xla_backend_optimization_level": 0}

os.environ["JAX_PLATFORMS"] = "cpu"
for _name, _value in _XLA_FLAGS.items():
    if _name not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --{_name}={_value}".strip()
os.environ["SHARDWRIGHT_CACHE"] = "off"
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # or each of a thousand processes would compile every module again
sys.dont_write_bytecode = False
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="shardwright-state-")  # tokens of the servers that tests start
atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)

for _signal, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_signal) is signal.SIG_IGN:  # what a shell has put in the background hears no Ctrl-C
        signal.signal(_signal, _handler)
