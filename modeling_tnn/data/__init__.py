"""Data in Python: tokenizers, blocks of tokens, genomes and their variants."""
