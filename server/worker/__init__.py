"""A node: a daemon that outlives (`state`, `daemon`) its executor child that owns the devices (`executor`)."""
