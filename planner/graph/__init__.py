"""The program as a dataflow graph: producers and consumers of arrays, imported shardings, equal operations."""
