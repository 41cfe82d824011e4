"""The JAX front end: a function and the types of its arguments become HLO text."""

from shardwright.client.frontends.jax.function import JaxFunction, Signature

__all__ = ["JaxFunction", "Signature"]
