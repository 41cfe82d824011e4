"""Plan cache: the store, its keys, and relabeling of cached plans."""
