"""Checks against an outside truth: XLA's compilers, single-device JAX, what others published."""
