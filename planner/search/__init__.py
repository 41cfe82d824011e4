"""Search over meshes, micro-batches and rematerialization, with lower bounds on the optimum."""
