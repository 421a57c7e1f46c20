"""Conversion, checks and measures of models."""
