"""Warm start: records of earlier searches, and their use in later ones."""
