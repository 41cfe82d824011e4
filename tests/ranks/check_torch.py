"""Run as every rank: PyTorch's tensors in, the same kind out."""

from __future__ import annotations

import numpy as np
import torch

from shardwright import ranks


def main() -> None:
    ranks.init(timeout_s=60)
    rank, size = ranks.rank(), ranks.size()
    total = sum(range(size))
    for length in (3, 5000):
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int8):
            found = ranks.allreduce(torch.full((length,), rank, dtype=dtype), "sum")
            assert isinstance(found, torch.Tensor)
            assert found.dtype is dtype
            assert bool((found == total).all())
        assert ranks.allgather(torch.full((length, 2), rank)).shape == (length * size, 2)
        strided = torch.arange(2 * length).reshape(2, length).t() + rank
        assert torch.equal(ranks.broadcast(strided, 0), strided - rank)
    found = ranks.allreduce({"w": torch.ones(2, requires_grad=True), "n": np.ones(2)})
    assert isinstance(found["w"], torch.Tensor)
    assert isinstance(found["n"], np.ndarray)
    received, counts = ranks.alltoall(torch.arange(size), [1] * size)
    assert isinstance(received, torch.Tensor)
    assert counts.tolist() == [1] * size
    ranks.shutdown()


if __name__ == "__main__":
    main()
