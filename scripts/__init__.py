"""The programs, run as `python scripts/NAME.py`, and the modules that they share."""
