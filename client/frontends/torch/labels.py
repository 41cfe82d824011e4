"""Where an operator of the graph comes from: the module's path and the user's source line.

Modules are followed by hooks. An operator of the backward pass has the label of the forward operator that made its
autograd node; both share a sequence number.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._python_dispatch import TorchDispatchMode

#: Source files that are no user's: PyTorch's, JAX's and this package's.
_OTHERS = tuple(str(Path(file).parent) + "/" for file in (torch.__file__, jax.__file__, str(Path(__file__).parents[1])))
OPTIMIZER = "optimizer"


@dataclass(frozen=True, slots=True)
class Label:
    """module: its path in the model, e.g. `h.0.attn`, `optimizer`, or "" outside of all modules. file, line and
    function: of the user's call; "" and 0 if there is none. kind: "" of what is not differentiated, "forward",
    "backward", or "recomputed" in the backward pass.
    """

    module: str = ""
    file: str = ""
    line: int = 0
    function: str = ""
    kind: str = ""

    @property
    def place(self) -> str:
        """`h.0.attn (model.py:12)`."""
        at = f"{self.file}:{self.line}" if self.file else ""
        return f"{self.module} ({at})" if self.module and at else self.module or at

    @property
    def scope(self) -> str:
        """As JAX names it: `jvp(h.0)/attn` forward, `transpose(jvp(h.0))/attn` backward."""
        first, *inner = _scopes(self.module) or ["loss" if self.kind else ""]
        if self.kind == "forward":
            first = f"jvp({first})"
        elif self.kind:
            first = f"transpose(jvp({first}))"
        return "/".join([first, *inner])


def _scopes(module: str) -> list[str]:
    """`h.0.attn` → `h.0`, `attn`: a number belongs to its container."""
    scopes: list[str] = []
    for part in module.split(".") if module else ():
        if part.isdigit() and scopes:
            scopes[-1] += f".{part}"
        else:
            scopes.append(part)
    return scopes


class Labels(TorchDispatchMode):  # type: ignore[misc]
    """Labels the nodes that operators leave in the graph being traced: `node.meta["label"]`.

    Random operators are numbered as well, `node.meta["draw"]`.
    draws: the next number. most_draws: the largest one so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.draws = 0
        self.most_draws = 0
        self._modules: list[str] = []
        self._labels: dict[int, Label] = {}

    @contextmanager
    def of(self, model: Any, optimizers: Any) -> Iterator[None]:
        """Hooks in the model's modules and the optimizers while the graph is traced."""
        with ExitStack() as hooks:
            for path, module in model.named_modules():
                enter = module.register_forward_pre_hook(self._enter(path), prepend=True)
                leave = module.register_forward_hook(self._leave, always_call=True)
                hooks.callback(enter.remove)
                hooks.callback(leave.remove)
            for optimizer in optimizers:
                hooks.callback(optimizer.register_step_pre_hook(self._enter(OPTIMIZER)).remove)
                hooks.callback(optimizer.register_step_post_hook(self._leave).remove)
            hooks.enter_context(self)
            yield

    def _enter(self, path: str) -> Any:
        def enter(*_: Any) -> None:
            self._modules.append(path)

        return enter

    def _leave(self, *_: Any) -> None:
        self._modules.pop()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        graph = get_proxy_mode().tracer.graph
        last = graph._root._prev
        label = self._label_now()
        result = op(*args, **(kwargs or {}))
        is_random = torch.Tag.nondeterministic_seeded in op.tags
        node = graph._root._prev
        while node is not last:
            node.meta["label"] = label
            if is_random:
                node.meta["draw"] = self.draws
            node = node._prev
        self.draws += is_random
        self.most_draws = max(self.most_draws, self.draws)
        return result

    def rewind(self, draws: int) -> None:
        """The next random operators draw again what those from number `draws` on drew."""
        self.draws = draws

    def _label_now(self) -> Label:
        backward = torch._C._current_autograd_node()
        module = self._modules[-1] if self._modules else ""
        if backward is not None and not module:
            forward_label = self._labels.get(backward._sequence_nr(), Label())
            return Label(
                forward_label.module, forward_label.file, forward_label.line, forward_label.function, "backward"
            )
        frame = _user_frame()
        code = frame.f_code if frame is not None else None
        kind = "recomputed" if backward is not None else "forward" if torch.is_grad_enabled() else ""
        label = Label(
            module,
            code.co_filename if code else "",
            frame.f_lineno if frame else 0,
            code.co_name if code else "",
            kind,
        )
        if kind == "forward":
            self._labels[torch.autograd._get_sequence_nr() - 1] = label
        return label


def is_user_file(name: str) -> bool:
    """Whether a source file is neither PyTorch's, JAX's nor ours."""
    return not name.startswith(_OTHERS) and not name.startswith("<")


def user_line() -> str:
    """Where the user's code is now: file, line and function."""
    frame = _user_frame()
    return f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})" if frame is not None else ""


def _user_frame() -> FrameType | None:
    """The innermost frame that is neither PyTorch's nor ours."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if is_user_file(name) and "/contextlib.py" not in name:
            return frame
        frame = frame.f_back
    return None
