"""Vision models of timm beside eager PyTorch.

timm imports torchvision, whose wheels go with the CUDA build of PyTorch only; its models do without, so names of
torchvision stand for nothing here where it is not installed.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import shardwright as sw
from tests.torch_frontend.comparison import adamw, compare, sgd
from tests.torch_frontend.models import floats, ids

pytestmark = pytest.mark.dear


class _Nothing(type):
    """A class of which every attribute is another such class, or itself called."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing(name, (), {})

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls


class _Module(ModuleType):
    __path__: Sequence[str] = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing(name, (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname.partition(".")[0] != "torchvision":
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: Any) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


@pytest.fixture(scope="module")
def timm() -> Any:
    pytest.importorskip("safetensors")
    if importlib.util.find_spec("timm") is None:
        pytest.skip("timm is not installed")
    finder = _Finder()
    is_stand_in = importlib.util.find_spec("torchvision") is None
    if is_stand_in:
        sys.meta_path.append(finder)
    try:
        import timm

        yield timm
    finally:
        if is_stand_in:
            sys.meta_path.remove(finder)
            for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
                del sys.modules[name]


def class_loss(model: Any, x: Any, y: Any) -> Any:
    return F.cross_entropy(model(x), y)


def images() -> list[Any]:
    return [(floats(8, 3, 32, 32, seed=n), ids(8, below=10, seed=n)) for n in range(5)]


def test_vision_transformer(session: sw.Session, timm: Any) -> None:
    torch.manual_seed(0)
    model = timm.create_model(
        "vit_tiny_patch16_224", num_classes=10, img_size=32, patch_size=8, depth=2, embed_dim=48, num_heads=3
    )
    compare(session, model, sgd, class_loss, images())


def test_convnext(session: sw.Session, timm: Any) -> None:
    from timm.models.convnext import ConvNeXt

    torch.manual_seed(0)
    model = ConvNeXt(depths=(1, 1, 1, 1), dims=(16, 16, 32, 32), num_classes=10, patch_size=2)
    compare(session, model, adamw, class_loss, images(), state_bound=0)
