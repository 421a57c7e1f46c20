"""Modules that the programs share: arguments, errors, files, checkpoints, training loops."""
