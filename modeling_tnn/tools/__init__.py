"""Conversion, checks and measures of models; their cards and uploads."""
