"""Stage programs: a step that was cut into stages, as programs, values and tasks.

program_assignment    which program computes what of a micro-batch's work; cross_stage_sums: sums over stages
layouts               how values lie on a stage: read from the plan of the whole step on its mesh
program_writer        one program while it is written
microbatch_programs   the programs of a micro-batch, and those before the first one; weight_programs: weight gradients
argument_placement    which stage keeps which argument, and computes what of the once part
update_waves          when: in how many waits for other stages
update_programs       the programs after the last micro-batch
pricing               programs → Plans: collectives, seconds, memory, checked
boundary              the user's arguments and outputs; values: everything that programs hand on
check                 the finished PipelinePlan beside itself
pipeline_plan         all of it; build: from the search's choice
"""

from shardwright.planner.pipeline.boundary import Origin
from shardwright.planner.pipeline.check import check_pipeline
from shardwright.planner.pipeline.pipeline_plan import PipelineSpec, make_pipeline
from shardwright.planner.stages.types import StageGroup

__all__ = ["Origin", "PipelineSpec", "StageGroup", "check_pipeline", "make_pipeline"]
