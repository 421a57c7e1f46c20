"""Many sequences that are generated in one batch."""
