"""Print a cluster file of many equal GPU nodes.

    python scripts/cluster_file.py a100_64x8 --nodes 64 --hardware a100 \\
        --intra-node nvlink-3 --inter-node infiniband-hdr

Kinds of links: shardwright/clusters/links.toml; profiles of hardware: shardwright/cost/data.
"""

from __future__ import annotations

import argparse
import json
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--gpus", type=int, default=8, help="of a node (default: 8)")
    parser.add_argument("--hardware", required=True, help="hardware profile, e.g. a100")
    parser.add_argument("--intra-node", required=True, help="kind of link, e.g. nvlink-3")
    parser.add_argument("--inter-node", required=True, help="kind of link, e.g. infiniband-hdr (200 Gbit/s)")
    parser.add_argument("--ports", type=int, default=1, help="of a node, into the network (default: 1)")
    arguments = parser.parse_args()
    if not 1 <= arguments.nodes <= 64 * 254:
        raise SystemExit("--nodes: 1 to 16256")
    print(cluster_text(arguments))


def cluster_text(arguments: argparse.Namespace) -> str:
    """JSON with one line a node."""
    head = {
        "name": arguments.name,
        "hardware": arguments.hardware,
        "insecure": True,
        "links": {
            "intra_node": arguments.intra_node,
            "inter_node": {"kind": arguments.inter_node, "ports": arguments.ports},
        },
    }
    nodes = [json.dumps(node(number, arguments.gpus)) for number in range(arguments.nodes)]
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
    workers = ",\n".join(f"    {text}" for text in nodes[1:])
    return "\n".join(["{", *lines, f'  "master": {nodes[0]},', '  "workers": [', workers, "  ]", "}"])


def node(number: int, gpus: int) -> dict[str, Any]:
    """Addresses 10.0.0.1, …, 10.0.0.254, 10.0.1.1, …"""
    high, low = divmod(number, 254)
    return {"ip": f"10.0.{high}.{low + 1}", "port": 2222, "gpu_ids": list(range(gpus))}


if __name__ == "__main__":
    main()
