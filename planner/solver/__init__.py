"""The choice problem: exact reductions, message passing, and an integer program for what they leave."""
