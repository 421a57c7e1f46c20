"""The threads that PyTorch computes with: no more than the CPUs that this process may use.

PyTorch takes one for each core of the machine, also in a container that may use less, where threads wait for another.
"""

import os
import sys
from pathlib import Path


def cpu_quota(root: Path = Path("/sys/fs/cgroup"), groups: Path = Path("/proc/self/cgroup")) -> float:
    """The CPUs that the control groups of this process may use at once (cgroup v2, `cpu.max`); inf without a limit."""
    try:
        names = [line[3:] for line in groups.read_text().splitlines() if line.startswith("0::")]
    except OSError:  # not Linux
        return float("inf")
    own = root / (names[0].strip("/") if names else "")
    limits = [float("inf")]
    for folder in (root, own, *own.parents):  # a container sees its own group as the root
        file = folder / "cpu.max"
        if folder.is_relative_to(root) and file.is_file():
            quota, period = file.read_text().split()
            limits += [] if quota == "max" else [int(quota) / int(period)]
    return min(limits)


def limit_threads():
    """Let PyTorch, which is not imported yet, keep to the quota, unless OMP_NUM_THREADS is set, as torchrun does."""
    if "OMP_NUM_THREADS" in os.environ or "torch" in sys.modules:
        return
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = max(1, int(min(cpus, cpu_quota())))
    if threads < os.cpu_count():
        os.environ["OMP_NUM_THREADS"] = str(threads)
