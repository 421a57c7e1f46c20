"""How a program ends: one line of what its user can do something about, a traceback of its own mistakes.

Imported before anything else (isort's `force-to-top`): some libraries speak while they are imported.
"""

import functools
import logging
import sys
import threading
from _thread import interrupt_main
from collections.abc import Callable
from signal import SIGINT

# transformers imports torchao wherever it is installed. It warns that it lacks code for devices that are not here, and
# PyTorch that torchao uses something deprecated: neither is about what the program does.
for _imported in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_imported).setLevel(logging.ERROR)
# What they log before they raise an error is said by the error: each attempt to reach the Hub, a file that is damaged.
QUIET = {"huggingface_hub": logging.ERROR, "datasets": logging.CRITICAL}


class UserError(RuntimeError):
    """What the user of a program can do something about; its message is all that they need."""


def interrupt_again(unraisable):
    """`sys.unraisablehook`: Ctrl-C that Python delivered to a `__del__`, where it is lost, comes once more.

    The regex library has such methods, and they are what runs first after a long call of the tokenizer. From another
    thread, since this function would be interrupted as well.
    """
    if unraisable.exc_type is KeyboardInterrupt:
        threading.Timer(0.05, interrupt_main).start()
    else:
        sys.__unraisablehook__(unraisable)


def report_errors(main: Callable[[], None]) -> Callable[[], None]:
    """`main`, which ends with `error: ...` and a status: 2 for what was given, 1 for what happened, 130 for Ctrl-C.

    ValueError and a file that is not there are of the first kind; OSError (a disk, a network), ImportError (a package
    that is not installed) and UserError of the second. Whatever else is raised is a mistake of the program and keeps
    its traceback.
    """

    @functools.wraps(main)
    def reporting():
        for library, level in QUIET.items():
            logging.getLogger(library).setLevel(level)
        sys.unraisablehook = interrupt_again
        try:
            main()
        except KeyboardInterrupt:
            sys.stderr.write("stopped by Ctrl-C\n")
            sys.exit(128 + SIGINT)
        except (ValueError, FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            leave(str(error), 2)
        except (OSError, ImportError) as error:
            leave(" ".join(str(error).split()), 1)  # libraries break their lines
        except UserError as error:
            leave(str(error), 1)
        except Exception as error:
            # Of data that cannot be read; not imported, since most programs read none.
            if not type(error).__module__.startswith("datasets."):
                raise
            leave(f"{error}: {error.__cause__}", 2)

    return reporting


def leave(message: str, status: int):
    """End the program with a line on stderr.

    Raises:
        SystemExit: in any case.
    """
    sys.stderr.write(f"error: {message}\n")
    end = SystemExit(f"error: {message}")
    end.code = status
    raise end from None
