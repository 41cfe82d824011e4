"""Training steps of PyTorch modules on the servers.

step = shardwright.torch.parallelize(session, model, optimizer, lambda model, x, y: F.cross_entropy(model(x), y))
for x, y in loader:
    loss = step(x, y)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Unpack

from shardwright.builders.choices import read_options
from shardwright.client.frontends.torch import RemoteTensor, TorchStep
from shardwright.client.frontends.torch import parallelize as _parallelize
from shardwright.options.user_options import UserOptions, show_options

if TYPE_CHECKING:
    from shardwright.client.session import Session
    from shardwright.progress import PlanProgress

__all__ = ["RemoteTensor", "TorchStep", "parallelize"]


@show_options
def parallelize(
    session: Session,
    model: Any,
    optimizer: Any,
    loss_fn: Callable[..., Any],
    *,
    whole_step: bool | None = None,
    init: Callable[[Any], Any] | None = None,
    scaler: Any = None,
    progress: Callable[[PlanProgress], None] | None = None,
    **options: Unpack[UserOptions],
) -> TorchStep:
    """A training step of `model` that runs on the servers: forward, backward and optimizer in one program.

    Steps of one model share its state, and those of one optimizer the optimizer's. The learning rates of the groups are
    read at each call, so that schedulers work as ever.

    Args:
      model: a torch.nn.Module as you built it, not wrapped by torch.compile, DDP or FSDP. It may be on
        torch.device("meta").
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
      progress: called in this thread with a `PlanProgress` during planning.

    Raises OptionError: a wrapped module, a wrong optimizer or option. A call raises UnsupportedProgramError where the
    step decides by values of tensors, or uses operators that have no lowering: all of them, by operator and module.
    """
    builder, checked = read_options(options)
    return _parallelize(
        session, model, optimizer, loss_fn, options=checked, builder=builder, is_whole=whole_step, init=init,
        scaler=scaler, progress=progress,
    )  # fmt: skip
