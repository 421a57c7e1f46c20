"""What each program does after its command line is read: `runs/NAME.py` is imported by `NAME.py` only then."""
