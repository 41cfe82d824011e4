"""Run as every rank: the job is left and joined again, several times, with other collectives each time."""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwright import ranks
from shardwright.errors import CollectiveError
from shardwright.xla import private

SIZE, ROUNDS = int(sys.argv[1]), int(sys.argv[2])


def main() -> None:
    on_ranks = ranks.jit(lambda x: ranks.allreduce(x, "sum"))
    own = jax.jit(lambda x: x * 2)
    arrays, handles = [], []
    everyone, alone, others = None, None, None
    for number in range(ROUNDS):
        ranks.init(timeout_s=60)
        rank, size = ranks.rank(), ranks.size()
        assert size == SIZE
        assert private.has_devices()  # from here on no rank needs another one to begin with its own sets
        if everyone is None:
            everyone, alone = ranks.ProcessSet(range(size)), ranks.ProcessSet([rank])
            others = ranks.ProcessSet(range(1, size))
        total = sum(range(size))
        if number % 3 == 0:
            assert ranks.allreduce(np.full(5000, rank, "f"), "sum", process_set=everyone)[-1] == total
        if number % 3 == 1:
            if rank and others is not None:
                assert ranks.allgather(np.int32([rank]), process_set=others).tolist() == list(range(1, size))
            assert ranks.broadcast_object({"round": number} if rank == 0 else None) == {"round": number}
        assert ranks.allgather(rank, process_set=alone) == [rank]
        assert float(on_ranks(np.float32(rank))) == total
        mine = jnp.full(3, rank + number, jnp.float32)
        arrays.append(own(mine) + 1)
        handles.append(ranks.allreduce_async(mine, "sum", name="last"))
        for round_, array in enumerate(arrays):  # of jobs before, too
            assert np.all(np.asarray(own(array)) == 4 * (rank + round_) + 2), (round_, array)
        ranks.shutdown()
        ranks.shutdown()
        with pytest.raises(CollectiveError, match="init"):
            ranks.barrier()
        for round_, handle in enumerate(handles):
            assert np.all(np.asarray(ranks.synchronize(handle)) == total + size * round_)
        print("round", number, flush=True)
    ranks.init(size=1)
    assert (ranks.rank(), ranks.size()) == (0, 1)
    assert ranks.allreduce(np.ones(5000)).sum() == float(on_ranks(np.float32(5000)))
    ranks.shutdown()


if __name__ == "__main__":
    main()
