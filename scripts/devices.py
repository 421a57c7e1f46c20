"""Where a program computes."""

import torch


def check_device(name: str) -> str:
    """The name of a device, for a command line.

    Raises:
        ValueError: it is none, or this machine has none such.
    """
    try:
        torch.empty(0, device=name)
    except (AssertionError, RuntimeError) as error:
        raise ValueError(f"device={name!r} is not possible: {str(error).splitlines()[0]}.") from error
    return name
