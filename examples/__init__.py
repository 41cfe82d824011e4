"""Training steps written for one device, run through Shardwright."""
