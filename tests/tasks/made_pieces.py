"""A pipelined step with everything that one can have, made up: what tests of orders and timelines put in order."""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.tasks import MICRO_BATCH, ProgramSpec, StepSpec, StepValue


def step_pieces(
    stages: int,
    micro_batches: int,
    *,
    chunks: int = 1,
    has_weight: bool = False,
    forward_s: Sequence[float] | float = 1.0,
    backward_s: Sequence[float] | float = 2.0,
    weight_s: float = 1.0,
    is_last_fused: bool = True,
) -> StepSpec:
    """A chain of `stages * chunks` chunks with a skip connection from the first to the last, a variable that both
    read, a batch split on the first and the last stage, accumulators, and a global norm before the update.

    is_last_fused: the last chunk's forward part is inside its backward program.
    """
    count = stages * chunks
    stage_of_chunk = tuple(chunk % stages for chunk in range(count))
    last, first_stage, last_stage = count - 1, 0, stage_of_chunk[-1]
    forwards = [forward_s] * count if isinstance(forward_s, float | int) else list(forward_s)
    backwards = [backward_s] * count if isinstance(backward_s, float | int) else list(backward_s)
    has_skip = count > 1
    pieces: list[ProgramSpec] = []

    pieces.append(
        ProgramSpec(program="split.in", kind="split", stage=0, reads=("tokens", MICRO_BATCH), writes=("token",))
    )
    pieces.append(
        ProgramSpec(
            program="split.out", kind="split", stage=last_stage, reads=("labels", MICRO_BATCH), writes=("label",)
        )
    )
    for chunk in range(count):
        stage = stage_of_chunk[chunk]
        is_last = chunk == last
        ahead = ("token",) if chunk == 0 else (f"act.{chunk - 1}",)
        skip = ("act.0", "w.0") if is_last and has_skip else ()
        result = (f"grad.{chunk - 1}",) if chunk > 0 else ()
        skip_back = ("grad.skip",) if is_last and has_skip else ()
        skip_in = ("grad.skip",) if chunk == 0 and has_skip else ()
        left = f"res.{chunk}"
        is_fused = is_last and is_last_fused
        sums = (f"acc.{chunk}", *(("acc.tied",) if is_last and has_skip else ()), *(("loss",) if is_last else ()))
        if not is_fused:
            pieces.append(
                ProgramSpec(
                    program=f"forward.{chunk}",
                    kind="forward",
                    stage=stage,
                    chunk=chunk,
                    reads=(f"w.{chunk}", *ahead, *skip),
                    writes=(left,) if is_last else (f"act.{chunk}", left),
                    time_s=forwards[chunk],
                )
            )
        back = ("label", *((*ahead, *skip) if is_fused else (left,))) if is_last else (left, f"grad.{chunk}")
        delayed = sums[:1] if has_weight else ()
        now = sums[len(delayed) :]
        pieces.append(
            ProgramSpec(
                program=f"backward.{chunk}",
                kind="backward",
                stage=stage,
                chunk=chunk,
                reads=(f"w.{chunk}", *back, *skip_in, *now),
                writes=(*result, *skip_back, *now, *((f"delayed.{chunk}",) if has_weight else ())),
                donates=(*((left,) if not is_fused else ()), *now),
                time_s=backwards[chunk],
                workspace_bytes=3,
            )
        )
        if has_weight:
            pieces.append(
                ProgramSpec(
                    program=f"weight.{chunk}",
                    kind="weight",
                    stage=stage,
                    chunk=chunk,
                    reads=(f"delayed.{chunk}", *delayed),
                    writes=delayed,
                    donates=delayed,
                    time_s=weight_s,
                )
            )
    sums_of = {
        stage: [
            *(f"acc.{chunk}" for chunk in range(count) if stage_of_chunk[chunk] == stage),
            *(["acc.tied"] if has_skip and stage == last_stage else []),
            *(["loss"] if stage == last_stage else []),
        ]
        for stage in range(stages)
    }
    for stage in range(stages):
        own = [chunk for chunk in range(count) if stage_of_chunk[chunk] == stage]
        accumulators = tuple(f"acc.{chunk}" for chunk in own)
        tied = ("acc.tied",) if has_skip and stage == first_stage else ()
        pieces.append(ProgramSpec(program=f"start.{stage}", kind="start", stage=stage, writes=tuple(sums_of[stage])))
        pieces.append(
            ProgramSpec(
                program=f"apply.0.{stage}", kind="apply", stage=stage, reads=accumulators, writes=(f"norm.{stage}",)
            )
        )
        pieces.append(
            ProgramSpec(
                program=f"apply.2.{stage}",
                kind="apply",
                stage=stage,
                reads=("norm", *(f"w.{chunk}" for chunk in own), *accumulators, *tied),
                writes=tuple(f"w.{chunk}.new" for chunk in own),
                donates=(*(f"w.{chunk}" for chunk in own), *accumulators),
            )
        )
    norms = tuple(f"norm.{stage}" for stage in range(stages))
    pieces.append(ProgramSpec(program="apply.1", kind="apply", stage=last_stage, reads=norms, writes=("norm",)))
    arguments = [*((f"w.{c}", stage_of_chunk[c]) for c in range(count)), ("tokens", 0), ("labels", last_stage)]
    outputs = [*((f"w.{c}.new", stage_of_chunk[c]) for c in range(count)), ("loss", last_stage)]
    return StepSpec(
        micro_batches=micro_batches,
        stage_of_chunk=stage_of_chunk,
        values=_values(pieces, [name for name, _ in arguments], stages),
        programs=tuple(pieces),
        arguments=tuple(arguments),
        outputs=tuple(outputs),
    )


def _values(pieces: Sequence[ProgramSpec], arguments: Sequence[str], stages: int) -> tuple[StepValue, ...]:
    """Every name that a piece mentions: 10 bytes an activation, 100 a variable, 1 everything else, on any stage."""
    once = {name for piece in pieces if piece.kind in ("start", "apply") for name in piece.writes} | set(arguments)
    names = dict.fromkeys(name for piece in pieces for name in (*piece.reads, *piece.writes) if name != MICRO_BATCH)
    sizes = {"act": 10, "res": 10, "grad": 10, "w": 100}
    return tuple(
        StepValue(
            name=name,
            scope="step" if name in once else "micro_batch",
            sizes=dict.fromkeys(range(stages), sizes.get(name.split(".")[0], 1)),
            sent_bytes=sizes.get(name.split(".")[0], 1),
        )
        for name in names
    )
