"""Models, and long sequences, over several processes."""
