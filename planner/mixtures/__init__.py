"""Mixtures of experts by ragged products."""
