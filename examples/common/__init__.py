"""What the examples share: real data, options, progress."""
