"""The state that a session keeps, as it is after the last step that was sent.

A step that takes a kept array over has its successor kept in its place, in the same message: whenever this program
ends, the servers know a state that belongs together.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Sequence
from typing import Any

from shardwright.checkpoints import trees
from shardwright.client.array_specs import array_type
from shardwright.client.arrays import RemoteArray
from shardwright.client.placement import Placement, RowParts, parts_of
from shardwright.client.programs import StepProgram
from shardwright.proto.v1 import master_pb2
from shardwright.protocol import wire


class KeptState:
    """Of one session. The caller of its methods holds the session's lock.

    tree, leaves: the state as it is after the last step that was sent. updates: see `Resumed`. is_lost: whether its
    arrays are gone with the executors: then nothing is kept.
    """

    def __init__(self, tree: trees.Tree, leaves: Sequence[RemoteArray], updates: int) -> None:
        self.tree = tree
        self.leaves = list(leaves)
        self._sent = b""  # the description that the server has
        self.updates = updates
        self.is_lost = False

    def message_after(
        self, program: StepProgram, leaves: Sequence[Any], outputs: Sequence[tuple[int, ...]]
    ) -> master_pb2.KeptState | None:
        """What is kept once a step has begun; None while some of it has yet to be made. outputs: ids of its results."""
        if self.is_lost:
            return master_pb2.KeptState(updates=self.updates)
        successors = _successors(program, leaves)
        places: list[tuple[tuple[int, ...], Placement]] = []
        for leaf in self.leaves:
            output = successors.get(id(leaf))
            ids, place = (leaf._ids, leaf._place) if output is None else (outputs[output], program.outputs[output])
            if not ids or place is None:
                return None
            places.append((ids, place))
        description = self._describe([place for _, place in places])
        replaced = any(id(leaf) in successors for leaf in self.leaves)
        message = master_pb2.KeptState(
            array_ids=[array_id for ids, _ in places for array_id in ids], updates=self.updates + replaced
        )
        if description != self._sent:
            message.description = self._sent = description
        return message

    def put_into(
        self,
        request: master_pb2.RunStepsRequest,
        program: StepProgram,
        leaves: Sequence[Any],
        outputs: Sequence[tuple[int, ...]],
    ) -> None:
        """Has a step's request say what is kept once it has begun; see `message_after`."""
        message = self.message_after(program, leaves, outputs)
        if message is not None:
            request.kept.CopyFrom(message)

    def forget_sent(self) -> None:
        """The last request was not sent: the next one describes the state again."""
        self._sent = b""

    def follow(self, program: StepProgram, leaves: Sequence[Any], results: Sequence[RemoteArray | None]) -> None:
        """A step was sent: its results take the place of what it took over."""
        successors = _successors(program, leaves)
        followed = [successors.get(id(leaf)) for leaf in self.leaves]
        self.updates += any(output is not None for output in followed)
        for number, output in enumerate(followed):
            result = None if output is None else results[output]
            if result is not None:
                self.leaves[number] = result

    def _describe(self, places: Sequence[Placement]) -> bytes:
        arrays = [
            {
                "type": array_type("", leaf.spec).element_type,
                "shape": array_type("", leaf.spec).shape,
                "in_rows": isinstance(place, RowParts),
                "parts": [
                    [b64encode(wire.layout_to_proto(layout).SerializeToString()).decode(), row]
                    for layout, row in parts_of(place)
                ],
            }
            for leaf, place in zip(self.leaves, places, strict=True)
        ]
        return json.dumps({"tree": trees.to_json(self.tree), "arrays": arrays}, separators=(",", ":")).encode()


def _successors(program: StepProgram, leaves: Sequence[Any]) -> dict[int, int]:
    """`id()` of each handle that a step takes over → the number of the result in its place."""
    numbers = {argument: leaf for leaf, argument in enumerate(program.leaf_numbers)}
    return {
        id(leaves[numbers[argument]]): output
        for output, argument in program.lowered.aliases.items()
        if argument in numbers and isinstance(leaves[numbers[argument]], RemoteArray)
    }
