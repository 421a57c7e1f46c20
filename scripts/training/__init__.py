"""Training and evaluation: the loops, and the work of each program of `scripts/` that trains."""
