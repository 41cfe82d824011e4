"""How fast task lists run, and how well their simulation says so."""
