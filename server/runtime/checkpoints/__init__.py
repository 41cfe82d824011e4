"""Checkpoints: a worker writes its part of the arrays, and reads it back under any other plan."""
