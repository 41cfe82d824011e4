"""What others published of these models, and what follows from it."""

from __future__ import annotations

from dataclasses import dataclass

#: Images of a device and step, in Horovod's benchmark command and in TensorFlow's table.
BATCH = 64

#: Horovod's benchmark: 128 servers of 4 Pascal GPUs, RoCE of 25 Gbit/s.
NODE_DEVICES, NODES = 4, 128


@dataclass(frozen=True, kw_only=True)
class Published:
    """images_per_s: of one P100. efficiency: of 512 GPUs."""

    images_per_s: float
    efficiency: float


def _between(fewer: float, more: float, share: float) -> float:
    """Images a second of a network whose time lies between two others' by a share of the distance."""
    return 1 / ((1 - share) / fewer + share / more)


#: Blocks of ResNet-50, -101 and -152: nobody published ResNet-101 beside the others.
_BLOCKS = (16, 33, 50)
_RESNET_101 = _between(219, 91.8, (_BLOCKS[1] - _BLOCKS[0]) / (_BLOCKS[2] - _BLOCKS[0]))

#: One P100: TensorFlow's benchmarks (tensorflow/docs_src/performance/benchmarks.md at 5984ffef), DGX-1, May 2017,
#: synthetic data, batch 64: Inception V3 142, VGG-16 154, ResNet-50 219, ResNet-152 91.8. 512 GPUs: Horovod's README
#: and docs/benchmarks.rst (github.com/horovod/horovod); Sergeev and Del Balso, 2018, arXiv 1802.05799, for the method.
PUBLISHED = {
    "ResNet-101": Published(images_per_s=_RESNET_101, efficiency=0.90),
    "Inception V3": Published(images_per_s=142, efficiency=0.90),
    "VGG-16": Published(images_per_s=154, efficiency=0.68),
}
