"""Files showing the servers' programs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shardwright.errors import OptionError
from shardwright.plans.pipeline_plan import TASKS_FILE, PipelinePlan

if TYPE_CHECKING:
    from shardwright.client.cluster_view import ClusterView
    from shardwright.client.programs import StepProgram


def dump(cluster: ClusterView, program: StepProgram, folder: Path) -> tuple[Path, ...]:
    """Writes every text of a loaded program into `folder`; see `Step.dump`."""
    cluster.require_open()
    texts = {f"{name or program.name}.{form}": text for name, form, text in cluster.master.dump(program.executable_id)}
    if isinstance(program.plan, PipelinePlan):
        texts[TASKS_FILE] = program.plan.tasks.to_dot()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise OptionError(
            f"cannot be written ({error.strerror})", where=str(error.filename or folder), remedy="name another folder"
        ) from None
    return tuple(folder / name for name in texts)
