"""Tensors of this machine that stand for arrays on the servers: brought in where they are read, sent where written.

A step leaves the tensors here as they were. From then on they have a class of their own, beside their identity: any
function of PyTorch that takes one brings its values in first. Writes are seen by `_version`, which rises with each.
"""

from __future__ import annotations

import copy
import inspect
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

from shardwright.client.arrays import RemoteArray
from shardwright.client.frontends.torch.dtypes import to_tensor
from shardwright.client.limits import MOST_HANDED_OUT
from shardwright.errors import ArrayError, UnsupportedProgramError
