"""Training runs that others published and measured, planned as they were run: the outside judge of steps and memory."""
