"""The options of a plan: what users write, checked, and what the planner reads."""
