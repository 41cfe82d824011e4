"""The networks, and a training step of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import optax

import shardwright as sw
from workloads.cases import Case, Leaf, training_case
from workloads.image_classifiers.layers import (
    Branches,
    Chain,
    Convolution,
    Dense,
    Layer,
    MaxPool,
    MeanPool,
    Params,
    Residual,
    SpatialMean,
    batch_norm,
    chain,
)
from workloads.models.layers import cross_entropy

CLASSES = 1000


@dataclass(frozen=True, kw_only=True)
class Classifier:
    """image: height and width of the images that it is trained with."""

    network: Layer
    image: int


def resnet(blocks: tuple[int, ...] = (3, 4, 23, 3), width: int = 64) -> Layer:
    """A residual network of bottlenecks (He et al., 2015; arXiv 1512.03385): 101 layers with the default blocks.

    Its stride is in the middle convolution of a bottleneck.
    """
    layers: list[Layer] = [
        Convolution(channels=width, size=(7, 7), stride=2),
        MaxPool(size=3, stride=2, padding="SAME"),
    ]
    for level, count in enumerate(blocks):
        for block in range(count):
            stride = 2 if level > 0 and block == 0 else 1
            layers.append(_bottleneck(width * 2**level, stride, has_shortcut=block == 0))
    return Chain((*layers, SpatialMean(), Dense(features=CLASSES)))


def _bottleneck(width: int, stride: int, *, has_shortcut: bool) -> Layer:
    expand = Convolution(channels=4 * width, is_rectified=False)
    shortcut = Convolution(channels=4 * width, stride=stride, is_rectified=False)
    return Residual(
        body=Chain((Convolution(channels=width), Convolution(channels=width, size=(3, 3), stride=stride), expand)),
        shortcut=shortcut if has_shortcut else None,
    )


def vgg(levels: tuple[tuple[int, int], ...] = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))) -> Layer:
    """A network of 3 × 3 convolutions (Simonyan and Zisserman, 2014; arXiv 1409.1556): VGG-16 with the default levels.

    levels: channels and number of convolutions before each pooling.
    """
    layers: list[Layer] = []
    for channels, count in levels:
        layers += [Convolution(channels=channels, size=(3, 3), is_normalized=False)] * count
        layers.append(MaxPool(size=2, stride=2))
    hidden = Dense(features=4096, is_rectified=True)
    return Chain((*layers, hidden, hidden, Dense(features=CLASSES)))


def inception_v3() -> Layer:
    """Inception V3 (Szegedy et al., 2015; arXiv 1512.00567), without its auxiliary classifier."""
    stem = (
        Convolution(channels=32, size=(3, 3), stride=2, padding="VALID"),
        Convolution(channels=32, size=(3, 3), padding="VALID"),
        Convolution(channels=64, size=(3, 3)),
        MaxPool(size=3, stride=2),
        Convolution(channels=80, padding="VALID"),
        Convolution(channels=192, size=(3, 3), padding="VALID"),
        MaxPool(size=3, stride=2),
    )
    return Chain((*stem, *_mixed_blocks(), SpatialMean(), Dense(features=CLASSES)))


def _mixed_blocks() -> Iterator[Layer]:
    """The blocks at 35, 17 and 8 pixels, each of parallel branches."""
    for pooled in (32, 64, 64):
        yield Branches(
            (
                _convolutions((64, 1, 1)),
                _convolutions((48, 1, 1), (64, 5, 5)),
                _convolutions((64, 1, 1), (96, 3, 3), (96, 3, 3)),
                _pooled(pooled),
            )
        )
    yield Branches(
        (_halving(384), _halving(96, (64, 1, 1), (96, 3, 3)), MaxPool(size=3, stride=2)),
    )
    for inner in (128, 160, 160, 192):
        yield Branches(
            (
                _convolutions((192, 1, 1)),
                _convolutions((inner, 1, 1), (inner, 1, 7), (192, 7, 1)),
                _convolutions((inner, 1, 1), (inner, 7, 1), (inner, 1, 7), (inner, 7, 1), (192, 1, 7)),
                _pooled(192),
            )
        )
    yield Branches(
        (
            _halving(320, (192, 1, 1)),
            _halving(192, (192, 1, 1), (192, 1, 7), (192, 7, 1)),
            MaxPool(size=3, stride=2),
        )
    )
    for _ in range(2):
        fork = Branches((_convolutions((384, 1, 3)), _convolutions((384, 3, 1))))
        yield Branches(
            (
                _convolutions((320, 1, 1)),
                Chain((_convolutions((384, 1, 1)), fork)),
                Chain((_convolutions((448, 1, 1), (384, 3, 3)), fork)),
                _pooled(192),
            )
        )


def _convolutions(*kernels: tuple[int, int, int]) -> Layer:
    """Convolutions of channels, height and width each."""
    return chain([Convolution(channels=channels, size=(height, width)) for channels, height, width in kernels])


def _halving(channels: int, *before: tuple[int, int, int]) -> Layer:
    """Convolutions, the last one 3 × 3 at stride 2."""
    last = Convolution(channels=channels, size=(3, 3), stride=2, padding="VALID")
    return Chain((_convolutions(*before), last)) if before else last


def _pooled(channels: int) -> Layer:
    return Chain((MeanPool(size=3), Convolution(channels=channels)))


CLASSIFIERS = {
    "ResNet-101": Classifier(network=resnet(), image=224),
    "Inception V3": Classifier(network=inception_v3(), image=299),
    "VGG-16": Classifier(network=vgg(), image=224),
}


def build(classifier: Classifier, batch: int, *, groups: int = 1) -> Case:
    """A training step on `batch` images, by stochastic gradient descent with momentum.

    groups: parts of the batch, one after the other, with batch statistics of their own.
    """
    normalize = sw.local_statistics(batch_norm, groups=groups)
    shape = (batch, classifier.image, classifier.image, 3)

    def loss(params: Params, batch: Params) -> jax.Array:
        return cross_entropy(classifier.network.apply(params, batch["images"], normalize), batch["labels"])

    data = {
        "images": Leaf(shape, ("batch", None, None, None)),
        "labels": Leaf((batch,), ("batch",), jnp.int32),
    }
    params = classifier.network.parameters(shape)
    return training_case(loss, params, data, optax.sgd(0.01, momentum=0.9))
