"""What one device stores when it stores most: the program as XLA leaves it, its buffers, and how they pack."""
