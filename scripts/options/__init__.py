"""The options of programs whose runs read them as one object. No module here imports PyTorch or transformers."""
