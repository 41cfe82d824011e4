"""Plans against hand-written sharding, both judged from XLA's partitioned HLO: `python -m benchmarks.planner.run`."""
