"""Eight CPU devices for every test, set before anything imports JAX; nothing is answered from plans of other runs."""

from __future__ import annotations

import os
import signal

_DEVICES = "--xla_force_host_platform_device_count=8"

os.environ["JAX_PLATFORMS"] = "cpu"
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICES}".strip()
os.environ["SHARDWRIGHT_CACHE"] = "off"

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # what a shell has put in the background hears no Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)
