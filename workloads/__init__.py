"""Training steps that tests, benchmarks and oracles share. Nothing here knows any of them."""
