"""The programs of the command `tnn`. `NAME.py` reads the options of a program, and `training/NAME.py` does its work.

Nothing else imports a program. PyTorch is imported when the options are read.
"""
