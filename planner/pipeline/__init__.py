"""Stage programs: a step that was cut into stages, as programs, values and tasks.

homes      which program computes what of a micro-batch's work
layouts    how values lie on a stage: read from the plan of the whole step on its mesh
assembly   one program while it is written
chunks     the programs of a micro-batch, and those before the first one
owners     which stage keeps which argument, and computes what of the once part
phases     when: in how many waits for other stages
apply      the programs after the last micro-batch
pricing    programs → Plans: collectives, seconds, memory, checked
boundary   the user's arguments and outputs; values: everything that programs hand on
check      the finished PipelinePlan beside itself
make       all of it
"""

from shardwright.planner.pipeline.boundary import Origin
from shardwright.planner.pipeline.check import check_pipeline
from shardwright.planner.pipeline.make import Choice, make_pipeline
from shardwright.planner.stages.choice import StageGroup

__all__ = ["Choice", "Origin", "StageGroup", "check_pipeline", "make_pipeline"]
