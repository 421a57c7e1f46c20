"""Faster products, losses and kernels, for GPUs."""
