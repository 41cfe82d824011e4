"""Peak memory of one device: the program after XLA's passes, its buffers, and their packing."""
