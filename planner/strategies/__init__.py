"""The strategies of an instruction on a mesh, from the rules, and their legality."""
