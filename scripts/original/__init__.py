"""The checkpoints and option names of the released code."""
