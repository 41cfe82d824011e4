"""What an executor child does with its devices: arrays, programs, steps, array transfer."""
