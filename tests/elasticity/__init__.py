"""Clusters of real processes that shrink and grow."""
