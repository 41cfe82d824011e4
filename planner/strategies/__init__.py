"""The ways to compute an instruction on a mesh, from the rules; which of them are legal."""
