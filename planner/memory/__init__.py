"""Memory as a constraint of the search: multipliers per byte, feasible plans, rematerialization."""
