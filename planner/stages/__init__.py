"""Pipeline stages: which part of a step runs on which group of devices.

stage_graph           what a stage graph is: parts of the model with their seconds and bytes, values between them
cut                   a graph divided into stages: an integer program (cut_ilp), or intervals where there is one order
clustering            the parts of a step: the forward pass at its products, the rest with it
                      (backward_placement); loops by rows
device_groups         groups of devices for the stages
node_costs            what every node of a step takes on one group; workspace: what comes and goes meanwhile
weight_gradients      what of the backward pass may run later
graph_builder         the stage graph of a step; coarsen: with small parts joined
schedule_cost         seconds of a cut under a schedule
choose                the search over stages, meshes, micro-batches and schedules;
                      realize: its answer, a choice (types)
"""
