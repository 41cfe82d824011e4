"""From decisions to a Plan's parts: assembled, listed in a ledger, checked."""
