"""Figures and statistics of kernels."""
