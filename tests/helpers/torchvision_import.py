"""A plugin of pytest: torchvision is imported, also one that was compiled for another build of PyTorch.

Its compiled operators are missing then. Augmentation does not use them, but the import looks for two of them.
"""

import sys

import torch

try:
    import torchvision
except RuntimeError:
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import torchvision  # noqa: F401
