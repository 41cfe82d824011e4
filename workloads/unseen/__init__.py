"""Training steps that the planner was not built on, at realistic widths."""
