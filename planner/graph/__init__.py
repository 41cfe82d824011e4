"""The program as a graph: who makes which array and who reads it, what it brings along, what is alike in it."""
