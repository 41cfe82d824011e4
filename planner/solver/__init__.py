"""The choice problem: exact reductions, message passing, integer program."""
