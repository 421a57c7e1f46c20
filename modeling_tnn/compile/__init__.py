"""Models in graphs: torch.compile, torch.export, CUDA graphs."""
