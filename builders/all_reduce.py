"""AllReduce: every variable whole on every device, gradients summed by all-reduces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardwright.builders.base import Builder
from shardwright.builders.variables import Variable
from shardwright.clusters.cluster import Cluster
from shardwright.errors import OptionError
from shardwright.plans.variable_strategy import VariableStrategy


class AllReduce(Builder):
    """Data parallelism: variables and slots are whole on every device, gradients are all-reduced.

    Of a table's gradient only the rows of the batch's lookups are exchanged, if that is faster.

    bucket: maximum bytes of the gradients in one all-reduce, like the option `bucket`; AutoDist's `chunk_size` counts
        gradients instead.
    compression: None. Raises OptionError on any other: the sum is part of the planned program, in the gradient's type.
    """

    def __init__(self, bucket: int | str | None = None, compression: None = None) -> None:
        if compression is not None:
            raise OptionError(
                f"compression={compression!r}: a planned step sums gradients in the type that they are computed in",
                where="AllReduce(compression=)",
                remedy="compute the step in bfloat16: its gradients then travel in bfloat16",
            )
        self.bucket = bucket

    def build(self, variables: Sequence[Variable], cluster: Cluster) -> Mapping[str, VariableStrategy]:
        return {variable.name: VariableStrategy() for variable in variables}
