"""Pipeline stages: which part of a step runs on which group of devices.

`work` says what a stage graph is: coarse parts of the model with their seconds and bytes. `cut` divides one into
stages, by an integer program (`cut_ilp`) or, where there is only one order, by dynamic programming (`intervals`).
"""
