"""The Keras front end: models of Keras 3 on JAX."""
