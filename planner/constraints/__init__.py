"""User constraints: pins on tensors, forced strategies, and their consequences."""
