"""Cost of reshards and reductions: XLA's collectives and the links they cross."""
