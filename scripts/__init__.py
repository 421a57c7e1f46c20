"""The programs, run as `python scripts/NAME.py`, and the rooms behind them."""
