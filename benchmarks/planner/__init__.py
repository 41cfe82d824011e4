"""Plans against hand-written sharding, both judged as XLA compiles them: `python -m benchmarks.planner.run`."""
