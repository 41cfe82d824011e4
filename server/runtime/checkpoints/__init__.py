"""Checkpoints: what a worker writes of the arrays it holds, and reads back under any other plan."""
