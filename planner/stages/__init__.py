"""Pipeline stages: assignment of parts of a step to groups of devices.

stage_graph           stage graph: parts of the model with their seconds and bytes, values between them
cut                   a graph divided into stages: an integer program (cut_ilp); intervals, given a single order
clustering            the parts of a step: the forward pass divided at its products, the rest placed with it
                      (backward_placement); loops by rows
device_groups         groups of devices, one per stage
node_costs            cost of every node of a step on one group; workspace: temporaries of a part
weight_gradients      the deferrable part of the backward pass
graph_builder         the stage graph of a step; coarsen: the same with small parts joined
schedule_cost         seconds of a cut under a schedule
choose                the search over stages, meshes, micro-batches and schedules;
                      realize: its answer, a choice (types)
"""
