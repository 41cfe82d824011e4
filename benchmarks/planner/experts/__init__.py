"""Hand-written shardings on stock JAX, and what XLA's partitioned HLO of them counts to (frozen)."""
