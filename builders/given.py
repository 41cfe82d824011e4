"""Given: strategies by variable name, such as those of an edited plan."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from shardwright.builders.base import Builder
from shardwright.builders.variables import Variable
from shardwright.clusters.cluster import Cluster
from shardwright.errors import OptionError
from shardwright.input_files import read_input_text
from shardwright.json_reader import ObjectReader
from shardwright.plans.plan_json.reading import read_json, read_strategies
from shardwright.plans.variable_strategy import VariableStrategy
from shardwright.tuning import MOST_PROGRAM_BYTES

#: Suffix of the compile options with a plan's bucket.
_BUCKET_OPTION = "all_reduce_combine_threshold_bytes"


class Given(Builder):
    """The given strategies, by variable name; variables left out are all-reduced.

    bucket: see `AllReduce`.
    """

    def __init__(self, strategies: Mapping[str, VariableStrategy], bucket: int | str | None = None) -> None:
        self.strategies = dict(strategies)
        self.bucket = bucket

    def build(self, variables: Sequence[Variable], cluster: Cluster) -> Mapping[str, VariableStrategy]:
        return self.strategies


def load(path: str | os.PathLike[str]) -> Given:
    """Load the strategies and the bucket of a plan's JSON file; both may be edited, the rest is ignored.

    Raises OptionError for an unreadable file or one without strategies, PlanError with the wrong field.
    """
    try:
        text = read_input_text(path, most_bytes=MOST_PROGRAM_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise OptionError(f"cannot be read ({reason})", where=str(path), remedy="name a plan's JSON file") from None
    reader = ObjectReader(read_json(text), "plan", refuse_unknown=False)
    if not reader.has("strategies"):
        raise OptionError(
            "the plan records no strategies, as those of strategy builders do; plan= runs the plan itself",
            where=str(path),
        )
    bucket = None
    if reader.has("compile_options"):
        options = reader.object("compile_options")
        names = [name for name in options.names() if name.endswith(_BUCKET_OPTION)]
        bucket = options.integer(names[0]) if names else None
    return Given(read_strategies(reader), bucket)
