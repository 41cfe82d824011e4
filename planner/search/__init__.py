"""The search over meshes, micro-batches and what is computed again; bounds on what it may have missed."""
