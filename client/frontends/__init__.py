"""Front ends: how a framework's function becomes HLO text. JAX is the first."""
