"""Views of a plan for people: text, and predicted beside observed collectives."""
