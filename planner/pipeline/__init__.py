"""Stage programs: a step cut into stages, as programs, values and tasks.

program_assignment    the program of each instruction of a micro-batch; cross_stage_sums: sums over stages
layouts               layouts of values on a stage, from the plan of the whole step on its mesh
program_writer        one program under construction
microbatch_programs   the programs of a micro-batch, and those before the first one; weight_programs: weight gradients
argument_placement    the stage of each argument, and of each instruction of the once part
update_waves          the schedule of the once part, in waits for other stages
update_programs       the programs after the last micro-batch
pricing               programs → Plans: collectives, seconds, memory, checked
boundary              the user's arguments and outputs; values: all values passed between programs
check                 consistency of the finished PipelinePlan
pipeline_plan         all of it; build: from the search's choice
"""

from shardwright.planner.pipeline.boundary import Origin
from shardwright.planner.pipeline.check import check_pipeline
from shardwright.planner.pipeline.pipeline_plan import PipelineSpec, make_pipeline
from shardwright.planner.stages.types import StageGroup

__all__ = ["Origin", "PipelineSpec", "StageGroup", "check_pipeline", "make_pipeline"]
