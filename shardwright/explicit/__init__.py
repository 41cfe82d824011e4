"""What JAX's Explicit mode has to be told so that `jax.jit` runs a plan: `plan.out_shardings()`."""
