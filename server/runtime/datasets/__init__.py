"""Batches that this worker reads itself; see docs/adr/0054-inputs-on-the-workers.md."""
