"""The suites of `benchmark.py`."""
