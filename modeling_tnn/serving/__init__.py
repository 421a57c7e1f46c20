"""Sequences that are generated in one batch, and the servers that answer with them."""
