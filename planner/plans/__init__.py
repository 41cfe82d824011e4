"""From decisions to a Plan's parts: assembly, ledger of collectives, checks."""
