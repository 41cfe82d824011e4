"""What the user decided: pins on tensors, forced strategies, and what follows from them."""
