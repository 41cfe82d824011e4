"""The program cut at its critical nodes, its variables, and the chain of segments to solve."""
