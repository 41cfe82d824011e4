"""The cluster: its file, schema, nodes and links."""
