"""Shared by the programs: arguments, errors, files, checkpoints, training loops."""
