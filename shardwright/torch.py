"""Training steps of PyTorch modules on the servers.

step = shardwright.torch.parallelize(session, model, optimizer, lambda model, x, y: F.cross_entropy(model(x), y))
for x, y in loader:
    loss = step(x, y)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from shardwright.builders.choices import read_options
from shardwright.client.frontends.torch import Bucket, RemoteTensor, TorchStep
from shardwright.client.frontends.torch import parallelize as _parallelize
from shardwright.client.frontends.torch.single_process import init_process_group as _init_process_group
from shardwright.client.frontends.torch.single_process import is_fully_sharded, mark_fully_sharded
from shardwright.options.user_options import UserOptions, show_options
from shardwright.plans.plan_text import plan_from_json

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from shardwright.client.frontends.torch.sharding import ShardedModule
    from shardwright.client.session import Session
    from shardwright.clusters.cluster import Cluster
    from shardwright.progress import PlanProgress
    from shardwright.user_plans import PipelinePlan, Plan

__all__ = [
    "Bucket",
    "RemoteTensor",
    "ShardedModule",
    "TorchStep",
    "fully_shard",
    "init_process_group",
    "parallelize",
    "plan",
    "shard",
]


@show_options
def parallelize(
    session: Session,
    model: Any,
    optimizer: Any,
    loss_fn: Callable[..., Any] | None = None,
    *,
    whole_step: bool | None = None,
    init: Callable[[Any], Any] | None = None,
    scaler: Any = None,
    buckets: Sequence[Bucket] = (),
    progress: Callable[[PlanProgress], None] | None = None,
    **options: Unpack[UserOptions],
) -> TorchStep:
    """A training step of `model` that runs on the servers: forward, backward and optimizer in one program.

    Steps of one model share its state, and those of one optimizer the optimizer's. The learning rates of the groups are
    read at each call, so that schedulers work as ever.

    Args:
      model: a torch.nn.Module as you built it, not wrapped by torch.compile or FSDP. It may be on
        torch.device("meta"), or in DistributedDataParallel in a job of one rank.
      optimizer: a torch.optim.Optimizer over its parameters; a list of several; or None for a step that updates no
        parameters, e.g. to evaluate or to predict.
      loss_fn: `loss_fn(model, *batch)`, which returns the loss, a tuple that begins with it, or something with a
        `loss`. Or the whole step, `step(model, optimizer, *batch)`, with zero_grad, backward and optimizer.step in it.
      whole_step: which of both `loss_fn` is. Default: the whole step if its second parameter is called `optimizer`,
        `optimizers`, `optim` or `opt`.
      init: fills the tensors of a module on torch.device("meta"), in place, on the servers. Default: each module's
        `reset_parameters`.
      scaler: a torch.amp.GradScaler; its scale is state on the servers. Around a loss function its calls are made as
        around `backward` and `optimizer.step`; a whole step makes them itself.
      buckets: `shardwright.torch.Bucket`s of arguments whose sizes change: they are filled up to the next of a few
        sizes, each of which has a program, and the step leaves out what is filled in.
      progress: called in this thread with a `PlanProgress` during planning.

    Raises OptionError: a wrapped module, a wrong optimizer or option. A call raises UnsupportedProgramError where the
    step decides by values of tensors, or uses operators that have no lowering: all of them, by operator and module.
    """
    if "force" not in options and is_fully_sharded(model):
        options["force"] = "fsdp"
    builder, checked = read_options(options)
    return _parallelize(
        session, model, optimizer, loss_fn, options=checked, builder=builder, is_whole=whole_step, init=init,
        scaler=scaler, buckets=buckets, progress=progress,
    )  # fmt: skip


@show_options
def plan(
    model: Any,
    optimizer: Any,
    loss_fn: Callable[..., Any],
    *batch: Any,
    cluster: Cluster | str | os.PathLike[str] | int,
    **options: Unpack[UserOptions],
) -> Plan | PipelinePlan:
    """A plan of the step on a cluster that need not be here; `to_json()` is what `shard` reads.

    Where nothing else is said, one in which every tensor is split as the module has it: `rewrites="none"`.

    Args:
      model, optimizer, loss_fn: see `parallelize`. They are not changed.
      batch: the whole batch of a step; its shapes count.
      cluster: a Cluster, the path of a cluster file, or a number of local CPU devices.
    """
    import shardwright

    with shardwright.connect(devices=1) as session:
        program = parallelize(session, model, optimizer, loss_fn).lower(*batch)
    options.setdefault("rewrites", "none")
    return shardwright.plan(program.hlo_text, cluster, **options)


def shard(
    module: Any,
    plan: Plan | PipelinePlan | str | os.PathLike[str],
    *,
    mesh: DeviceMesh | None = None,
    device_type: str | None = None,
    units: Sequence[type] = (),
) -> ShardedModule:
    """Lay a module out as a plan says in this job's own process group, without a server.

    Its parameters become DTensors in place: make the optimizer afterwards. Each rank calls the module on its own rows
    of the batch; gradients are averaged over them, as DDP and FSDP do.

    Args:
      module: as it was planned, whole on every rank; rank 0's values count.
      plan: of this module, for as many devices as there are ranks; or the file with its `to_json()`.
      mesh: the process group's, with the plan's names and sizes. Default: made here, of all ranks.
      device_type: of the mesh that is made, "cuda" or "cpu". Default: "cuda" where there is one.
      units: classes whose forward pass reads parameters of their children: entered as a whole.

    Raises PlanError: a pipeline, a plan of another module or of another number of ranks, or layouts that DTensor does
    not have, with the names of all such tensors.
    """
    import torch

    from shardwright.client.frontends.torch.sharding import shard_module  # importing DTensor takes a second

    read = plan_from_json(Path(plan).read_text()) if isinstance(plan, str | os.PathLike) else plan
    kind = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    return shard_module(module, read, mesh=mesh, device_type=kind, units=units)


def init_process_group(*arguments: Any, **named: Any) -> None:
    """In place of `torch.distributed.init_process_group` in a script that is started once, by `python`.

    What torch's takes is taken and ignored: the group has this process alone, as rank 0 of 1, so that `get_rank`,
    `barrier`, `all_reduce`, `DistributedSampler` and `DistributedDataParallel` work as they stand.

    Raises OptionError in one of many ranks of torchrun.
    """
    _init_process_group(*arguments, **named)


def fully_shard(module: Any, **settings: Any) -> Any:
    """In place of `torch.distributed.fsdp.fully_shard` in a script that is started once: the module as it is.

    `parallelize` of it, or of what it is a part of, then asks for a fully sharded plan, as by `force="fsdp"`. The
    settings of torch's are ignored: what is gathered when is the plan's to say.
    """
    del settings
    return mark_fully_sharded(module)
