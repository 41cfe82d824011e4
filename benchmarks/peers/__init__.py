"""Suites of other projects, run against what is here: fetched for a run, never kept."""
