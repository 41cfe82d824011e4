"""Horovod's module names, for programs that are run unchanged: `import benchmarks.peers.horovod_names` comes first."""

import sys
import types
import unittest.mock

import shardwright.horovod.torch

sys.modules["horovod"], sys.modules["horovod.torch"] = shardwright.horovod, shardwright.horovod.torch
sys.modules["mock"] = unittest.mock
threads = sys.modules["horovod.runner.util.threads"] = types.ModuleType("threads")
threads.in_thread = None  # type: ignore[attr-defined]
