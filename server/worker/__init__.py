"""A node: a daemon (`state`, `daemon`) that outlives its executor child, the owner of the devices (`executor`)."""
