"""Front ends: how a framework's function becomes a program. A folder each, loaded when it is used."""
