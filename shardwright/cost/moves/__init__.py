"""What moves and sums take: the collectives that XLA makes of them, over the links that they cross."""
