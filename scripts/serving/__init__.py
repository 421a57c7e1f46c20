"""The servers of `tnn serve` and `tnn api`."""
