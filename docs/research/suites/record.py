"""A measurement with what it was taken by: settings, versions and the machine."""

import platform
from pathlib import Path
from types import ModuleType

import torch
import transformers

from tnn_programs.cli.model_path import check_device


def measured(suite: ModuleType, args) -> dict:
    """The settings and versions of a suite, and its rows."""
    args.device = check_device(args.device)
    torch.set_num_threads(args.threads)
    return described(args) | {"rows": suite.run(args)}


def described(args) -> dict:
    """The settings of a measurement, and the versions and the machine."""
    machine = torch.cuda.get_device_name() if args.device.startswith("cuda") else processor()
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "machine": machine}
    settings = {name: value for name, value in vars(args).items() if not isinstance(value, Path)}
    return {"settings": settings, "versions": versions}


def processor() -> str:
    """The name of the processor where Linux tells it, else its kind, with the widest vectors that PyTorch uses."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{next(names, platform.machine())} ({torch.backends.cpu.get_cpu_capability()})"
