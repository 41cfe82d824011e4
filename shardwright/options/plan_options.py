"""The options of a plan: their values and defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

#: Axes of a dimension, `True` for "split over some axis", `None` for "not split".
Pin = str | tuple[str, ...] | bool | None

#: Dimension → pin, for one tensor. A dimension left out is free.
Pins = Mapping[int, Pin]

#: Pins of one tensor, or all of it on every device.
TensorPins = Pins | Literal["replicated"]

#: The pin of a whole tensor.
REPLICATED: Literal["replicated"] = "replicated"

#: What becomes of arguments that `force` pins by no name: `search` leaves them to the planner, `replicated` keeps them
#: whole on every device, `data` splits the batch and keeps all others whole.
RESTS = ("search", "replicated", "data")

#: The named strategies that `force=` accepts.
FORCED_STRATEGIES = ("data", "tensor", "mixed", "megatron", "expert", "zero1", "fsdp", "replicated", "axes")

#: How hard the search works where no deadline says it: `fast` takes the first good plan,
#: `best` goes on until nothing better can be.
EFFORTS = ("fast", "default", "best")

#: The effort of a step that tries other plans while it runs, and keeps the fastest by measurement.
MEASURED = "measured"

#: Whether the planner may plan a rewritten program: `auto` where that pays, `none` the program as it stands.
REWRITES = ("auto", "none")

#: What the forward pass does not keep, but is computed again for the backward pass: `auto` what memory needs, `none`
#: nothing that the program keeps, `full` all but what segments hand on.
REMATS = ("auto", "none", "full")

#: Which attention becomes a fused kernel: `auto` what the devices have one for, `on` all that is recognised, float32
#: included, `off` none but the calls that stand in the program.
FUSED_ATTENTIONS = ("auto", "off", "on")

#: Where the optimizer's state is kept between its updates: `auto` in the host's memory where nothing faster fits the
#: devices', `none` in the devices' memory, `optimizer` in the host's.
OFFLOADS = ("auto", "none", "optimizer")

#: Shardings that a program brings along (constraints, `in_shardings`, `out_shardings`): kept, or left out.
CONSTRAINTS = ("keep", "ignore")

#: `search` looks for the fastest plan; `propagate` follows the annotations and searches nothing.
MODES = ("search", "propagate")

#: Most axes of a mesh.
MAX_MESH_AXES = 3


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Checked options of a plan; every default leaves the choice to the planner.

    Fields named as in `user_options.UserOptions` have the meaning there. Besides them:

    mesh: sizes of the axes by name, in order; None searches.
    argument_axes / output_axes: exact axes per dimension, by flat argument or output number: a program is planned
        around arrays already on the servers. They need `mesh`.
    argument_views / output_views: storage dimensions of some of these, when other than the program's
        (`VariablePlan.view_of`).
    local_arguments: flat numbers of arguments that workers read themselves: no client sends them, so that their arrival
        costs nothing.
    memory_budget: bytes on one device. memory_fraction: the same relative to the device's memory; not both. Neither:
        all of it.
    bucket_bytes: most bytes of the results that XLA combines into one collective; None: the compiler's default.
    deadline_s: seconds from the start of planning; None: once `effort` is spent.
    background, effort="measured": read by the client's steps, not by the planner.
    plan_json: a plan to run instead of a search, as JSON; "": none. No other choice of the plan's beside it.
    argument_names / output_names: pytree paths for messages and reports.
    """

    mesh: Mapping[str, int] | None = None
    force: str | Mapping[str, TensorPins] | None = None
    rest: str = "search"
    argument_axes: Mapping[int, tuple[tuple[str, ...], ...]] = field(default_factory=dict)
    output_axes: Mapping[int, tuple[tuple[str, ...], ...]] = field(default_factory=dict)
    argument_views: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    output_views: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    local_arguments: tuple[int, ...] = ()
    memory_budget: int | None = None
    memory_fraction: float | None = None
    bucket_bytes: int | None = None
    deadline_s: float | None = None
    micro_batches: int | None = None
    micro_batch_inexact: bool = False
    effort: str = "default"
    rewrites: str = "auto"
    remat: str = "auto"
    fused_attention: str = "auto"
    expert_capacity: float | None = None
    offload: str = "auto"
    mode: str = "search"
    simple: bool = True
    constraints: str = "keep"
    stages: int | None = None
    schedule: str | None = None
    imbalance: float | None = None
    background: bool = False
    plan_json: str = ""
    argument_names: tuple[str, ...] = ()
    output_names: tuple[str, ...] = ()

    def without_trials(self) -> PlanOptions:
        """The same options for one plan that stays: no other is tried beside it."""
        return replace(self, background=False, effort="default" if self.effort == MEASURED else self.effort)
