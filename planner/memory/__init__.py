"""Memory as a constraint of the search: prices of bytes, plans that fit, values computed again."""
