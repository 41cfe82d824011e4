"""Run as every rank, under any launcher's variables: what became of them, as a line of JSON."""

from __future__ import annotations

import json
import sys

from shardwright import ranks
from shardwright.errors import ShardwrightError


def main() -> None:
    try:
        ranks.init(timeout_s=float(sys.argv[1]), **json.loads(sys.argv[2]))
    except ShardwrightError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return
    place = {
        "rank": ranks.rank(), "size": ranks.size(), "local": [ranks.local_rank(), ranks.local_size()],
        "cross": [ranks.cross_rank(), ranks.cross_size()],
    }  # fmt: skip
    print(json.dumps({**place, "everyone": ranks.allgather(ranks.rank())}), flush=True)
    ranks.shutdown()


if __name__ == "__main__":
    main()
