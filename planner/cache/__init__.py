"""Plans kept for the next time: the store, its keys, and a kept plan in another program's names."""
