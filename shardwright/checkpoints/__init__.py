"""Names of checkpoint directories, and the tree of the state that they hold."""
