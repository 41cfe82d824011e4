"""An executor child's work on its devices: arrays, programs, steps, array transfer."""
