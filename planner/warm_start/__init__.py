"""Planning nearly the same program again: what searches leave behind, and how later ones use it."""
