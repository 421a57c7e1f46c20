"""Read and check a command line before PyTorch is imported: 0.1 seconds instead of 3.

Importing any module of `modeling_tnn` imports PyTorch and transformers, because that registers the Auto classes.
"""
