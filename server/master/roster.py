"""Which nodes of an elastic cluster take part in its next generation: a pure state machine.

| a node                              | is                                                                       |
|-------------------------------------|--------------------------------------------------------------------------|
| has its daemon here                 | a candidate                                                              |
| has been away for less than a grace | waited for, before the others start without it                           |
| failed                              | none for some seconds, twice as long after each further failure in a row |
| failed too often                    | left out, by name; after a cool-down it gets one more try                |

The rules are those of `shardwright.membership`, of which each node is a host with one slot.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from shardwright.clusters.cluster import Cluster
from shardwright.membership import (
    Decision,
    Event,
    HostFailed,
    HostsFound,
    LeaveOut,
    Limits,
    MemberLeft,
    Membership,
    Retire,
    TimePassed,
    Wait,
)
from shardwright.server.limits import Limits as ServerLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class Elasticity:
    """How a cluster may grow and shrink.

    min_nodes, max_nodes: of a generation; max_nodes None: all. rejoin_grace_s: time that a node has to come back.
    first_grace_s: time that one has to come for the first time, at least. max_failures: in a row, until a node is left
    out. first_wait_s: after the first. cooldown_s: until a node that was left out gets one more try.
    """

    min_nodes: int
    max_nodes: int | None = None
    rejoin_grace_s: float = 30.0
    first_grace_s: float = 30.0
    max_failures: int = 3
    first_wait_s: float = 1.0
    cooldown_s: float = 600.0


def elasticity_of(cluster: Cluster, limits: ServerLimits) -> Elasticity:
    """Of an elastic cluster's file, and the options of its server."""
    return Elasticity(
        min_nodes=cluster.min_nodes or 1,
        max_nodes=cluster.max_nodes,
        rejoin_grace_s=limits.rejoin_grace_s,
        max_failures=limits.node_failures,
        cooldown_s=limits.node_cooldown_s,
    )


class Roster:
    """The nodes of one elastic cluster. Times are of one clock, in seconds."""

    def __init__(self, nodes: Iterable[int], elasticity: Elasticity, now_s: float) -> None:
        self._elasticity = elasticity
        self._membership = Membership(
            Limits(
                min_size=elasticity.min_nodes,
                max_size=elasticity.max_nodes,
                max_failures=elasticity.max_failures,
                first_wait_s=elasticity.first_wait_s,
                cooldown_s=elasticity.cooldown_s,
            )
        )
        self._away_since_s = dict.fromkeys(nodes, now_s)  # of the nodes that are no candidates
        self._nodes = frozenset(self._away_since_s)
        self._here: frozenset[int] = frozenset()
        self._seen: frozenset[int] = frozenset()

    # ---- what is ---------------------------------------------------------------
    @property
    def nodes(self) -> frozenset[int]:
        """All that belong to the cluster."""
        return self._nodes

    @property
    def min_nodes(self) -> int:
        return self._elasticity.min_nodes

    @property
    def candidates(self) -> frozenset[int]:
        """Nodes that could take part now, at most as many as may."""
        return frozenset(map(int, self._membership.members.values()))

    @property
    def left_out(self) -> frozenset[int]:
        """Nodes that have failed too often."""
        return frozenset(map(int, self._membership.left_out))

    def choose(self, now_s: float, leaving: Collection[int] = ()) -> tuple[int, ...] | None:
        """The nodes of a generation that begins now, ascending; None: there are too few, or others are waited for.

        leaving: nodes that nobody waits for.
        """
        candidates = self.candidates
        if len(candidates) < self._elasticity.min_nodes:
            return None
        most = self._elasticity.max_nodes
        has_room = most is None or len(candidates) < most
        return None if has_room and self._awaited(now_s) - set(leaving) else tuple(sorted(candidates))

    def _awaited(self, now_s: float) -> set[int]:
        """Nodes that may be back soon."""
        away = self._away_since_s.items()
        return {node for node, since_s in away if node not in self.left_out and now_s - since_s < self._grace_s(node)}

    def _grace_s(self, node: int) -> float:
        elasticity = self._elasticity
        if node in self._seen:
            return elasticity.rejoin_grace_s
        return max(elasticity.first_grace_s, elasticity.rejoin_grace_s)

    # ---- what happens ----------------------------------------------------------
    def look(self, here: Collection[int], now_s: float) -> list[str]:
        """Time has passed, and the daemons of these nodes are here. Returns what is new, in words."""
        here = self._nodes.intersection(here)
        event: Event = TimePassed()
        if here != self._here:
            self._here = here
            self._seen |= here
            event = HostsFound({str(node): 1 for node in sorted(here)})
        return self._handle(event, now_s)

    def expect_only(self, team: Collection[int], now_s: float) -> None:
        """A master before has waited for the other nodes already: these take part, others as soon as they come."""
        self.look(team, now_s)
        self._away_since_s = dict.fromkeys(self._away_since_s, -math.inf)

    def fail(self, node: int, now_s: float) -> list[str]:
        """A generation ended through the fault of a node. Returns what follows, in words."""
        return self._handle(HostFailed(str(node)), now_s)

    def change_nodes(self, nodes: Iterable[int], now_s: float) -> None:
        """Other nodes belong to the cluster from now on."""
        self._nodes = frozenset(nodes)
        self._away_since_s = {node: self._away_since_s.get(node, now_s) for node in self._nodes - self.candidates}

    def _handle(self, event: Event, now_s: float) -> list[str]:
        decisions = self._membership.handle(event, now_s)
        for decision in list(decisions):
            if isinstance(decision, Retire):  # its daemon is gone: nothing has to end first
                decisions += self._membership.handle(MemberLeft(decision.member), now_s)
        candidates = self.candidates
        for node in candidates:
            self._away_since_s.pop(node, None)
        for node in self._nodes - candidates:
            self._away_since_s.setdefault(node, now_s)
        return [text for text in map(_describe, decisions) if text]


def _describe(decision: Decision) -> str:
    match decision:
        case Wait(host, seconds, failures):
            count = f"{failures} times in a row" if failures > 1 else "once"
            return f"node {host} has failed {count}: it takes no part for {seconds:g} s"
        case LeaveOut(host, seconds, failures):
            again = "" if seconds is None else f"; it gets one more try in {seconds:g} s"
            return f"node {host} has failed {failures} times in a row: it is left out{again}"
        case _:
            return ""
