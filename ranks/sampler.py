"""Which examples a rank takes, when ranks come and go: each of an epoch once, whoever is there."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

import numpy as np

from shardwright.errors import OptionError
from shardwright.ranks import job


class ElasticSampler:
    """Indices of an epoch, shared out among the ranks; after a change the remaining ones are shared out anew.

    Part of an elastic `State`, which saves and restores it. All ranks take batches of the same sizes in step:

        sampler = sw.ranks.elastic.ElasticSampler(dataset)
        for batch, indices in enumerate(batches(sampler, 32)):
            ...
            state.sampler.record_batch(batch, 32)
            state.commit()

    dataset: an object with a length, or a number of examples. shuffle: another order each epoch, by `seed` and epoch.
    If examples do not divide among the ranks, the first remaining ones are taken twice.
    """

    def __init__(self, dataset: Sized | int, shuffle: bool = True, seed: int = 0) -> None:
        self._total = dataset if isinstance(dataset, int) else len(dataset)
        if self._total < 1:
            raise OptionError(f"{self._total} examples", where="dataset", remedy="give a dataset that is not empty")
        self._shuffle = shuffle
        self._seed = seed
        self.epoch = 0
        self.processed_num = 0
        self._own: np.ndarray = np.zeros(0, np.int64)
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch: nothing of it has been processed."""
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Every rank has processed a batch of this size. batch_idx: as Horovod has it; not looked at."""
        self.processed_num = min(self._total, self.processed_num + batch_size * self._ranks()[1])

    def reset(self) -> None:
        """Share out the remaining examples among the present ranks."""
        rank, size = self._ranks()
        order = np.arange(self._total)
        if self._shuffle:
            order = np.random.default_rng([self._seed, self.epoch]).permutation(self._total)
        remaining = order[self.processed_num :]
        padded = np.resize(remaining, -(-len(remaining) // size) * size) if len(remaining) else remaining
        self._own = padded[rank::size]

    def state_dict(self) -> dict[str, Any]:
        """Where it is: the epoch, and how many of its examples all ranks have processed."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was."""
        self.epoch, self.processed_num = int(state["epoch"]), int(state["processed_num"])
        self.reset()

    def __iter__(self) -> Iterator[int]:
        return iter(self._own.tolist())

    def __len__(self) -> int:
        """Remaining examples of this rank."""
        return len(self._own)

    @staticmethod
    def _ranks() -> tuple[int, int]:
        return (job.rank(), job.size()) if job.is_initialized() else (0, 1)
