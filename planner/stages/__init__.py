"""Pipeline stages: which part of a step runs on which group of devices.

work       what a stage graph is: parts of the model with their seconds and bytes, values between them
cut        a graph divided into stages: an integer program (cut_ilp), or intervals where there is one order
coarse     the parts of a step: the forward pass at its products, the rest with it (backward); loops by rows
groups     groups of devices for the stages
measure    what every node of a step takes on one group; workspace: what comes and goes meanwhile
delayable  what of the backward pass may run later
graph      the stage graph of a step; contract: with small parts joined
priced     seconds of a cut under a schedule
choose     the search over stages, meshes, micro-batches and schedules; result: its answer, a choice
"""
