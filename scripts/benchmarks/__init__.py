"""The suites of `tnn benchmark`."""
