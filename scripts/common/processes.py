"""Several processes of one run: what is said when one of them is lost."""

from collections.abc import Iterator
from contextlib import contextmanager

from tnn_scripts.common.errors import UserError

import torch

# Where gloo says that a connection has ended or that nothing came, in the texts of plain RuntimeErrors.
OF_GLOO = ("gloo/transport", "[gloo]", "Connection closed by peer", "Connection reset by peer")


class LostProcessError(UserError):
    """The error for a process of the run that has ended, or has not answered in time."""


@contextmanager
def watching_processes() -> Iterator[None]:
    """Turn the errors of communication into one.

    Raises:
        LostProcessError: a process has ended or does not answer.
    """
    try:
        yield
    except RuntimeError as error:
        if not (isinstance(error, torch.distributed.DistError) or any(text in str(error) for text in OF_GLOO)):
            raise
        raise LostProcessError(
            "Another process of this run has ended, or has not answered within --ddp_timeout. What it wrote says why "
            f"({' '.join(str(error).split())[:200]})."
        ) from error
