"""The errors that a program tells its user in one line.

An error that its user can solve ends a program with one line, a mistake of the program with a traceback. This module
is imported first (isort's `force-to-top`), because some libraries log messages while they are imported.
"""

import errno
import functools
import logging
import os
import signal
import sys
import threading
from _thread import interrupt_main
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from signal import SIGINT

from tnn_programs.cli.threads import limit_threads

# transformers imports torchao if it is installed. torchao warns that it lacks code for other devices, and PyTorch that
# torchao uses deprecated functions. Neither concerns the program.
for _imported in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_imported).setLevel(logging.ERROR)
# These libraries log each attempt to reach the Hub, or a damaged file, and then raise an error that says the same.
QUIET = {"huggingface_hub": logging.ERROR, "datasets": logging.CRITICAL}
# Messages of libraries without an error number when a file cannot grow; the last two are torch.save's.
NO_SPACE = ("No space left", "Disk quota exceeded", "File too large", "unexpected pos", "failed writing file")


def is_disk_full(error: BaseException | None) -> bool:
    """Whether an error or its cause is a lack of space. A limit of file sizes ends a write in the same way."""
    while error is not None:
        numbers = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        if getattr(error, "errno", None) in numbers or any(text in str(error) for text in NO_SPACE):
            return True
        error = error.__cause__ or error.__context__
    return False


# Lines for stderr that are written once the command line is read, and before anything slow.
NOTICES: list[str] = []


class UserError(RuntimeError):
    """An error that the user of a program can solve. Its message says how."""


class MemoryExceededError(UserError):
    """The error for a lack of memory. Its message names options that help."""


def interrupt_again(unraisable):
    """A `sys.unraisablehook` that repeats Ctrl-C if Python delivered it to a `__del__`, where it is lost."""
    # The regex library has such methods, which run first after a long call of the tokenizer. In this thread the signal
    # would interrupt this function too.
    if unraisable.exc_type is KeyboardInterrupt:
        threading.Timer(0.05, interrupt_main).start()
    else:
        sys.__unraisablehook__(unraisable)


def end_quietly(kind: type, error: BaseException, trace):
    """A `sys.excepthook` without a traceback for Ctrl-C: while the modules of a program are imported."""
    if issubclass(kind, KeyboardInterrupt):
        os._exit(128 + SIGINT)
    sys.__excepthook__(kind, error, trace)


sys.excepthook = end_quietly


@contextmanager
def importing(extra: str | None = None, *needed: str) -> Iterator[None]:
    """Import what a program computes with, after its command line is read; ImportError that names a missing extra.

    Ctrl-C ends the process at once: libraries that are interrupted meanwhile raise any error, or write tracebacks.
    `needed` are packages of the `extra` that would be imported late: whether they are installed is asked first.
    """
    sys.stderr.writelines(f"{notice}\n" for notice in dict.fromkeys(NOTICES))
    NOTICES.clear()
    limit_threads()
    # Ctrl-C is ignored in what a shell runs in the background, and another thread cannot change that.
    in_main_thread = threading.current_thread() is threading.main_thread()
    replaced = signal.getsignal(SIGINT) is signal.default_int_handler and in_main_thread
    if replaced:
        signal.signal(SIGINT, lambda *_: os._exit(128 + SIGINT))
    try:
        for package in needed:
            if find_spec(package) is None:
                raise ModuleNotFoundError(name=package)
        yield
    except ModuleNotFoundError as error:
        if extra is None:
            raise
        message = f'{os.path.basename(sys.argv[0])} needs {error.name}: pip install "modeling-tnn[{extra}]"'
        raise ImportError(message) from error
    finally:
        if replaced:
            signal.signal(SIGINT, signal.default_int_handler)


def report_errors(main: Callable[[], None]) -> Callable[[], None]:
    """A `main` that ends with a line `error: ...` and a status: 2 for wrong inputs, 1 for failures, 130 for Ctrl-C.

    Wrong inputs are ValueError and missing files. Failures are OSError (disk, network), ImportError (a package that is
    not installed) and UserError. Any other error is a mistake of the program and keeps its traceback.
    """

    @functools.wraps(main)
    def reporting():
        for library, level in QUIET.items():
            logging.getLogger(library).setLevel(level)
        sys.unraisablehook = interrupt_again
        try:
            main()
        except KeyboardInterrupt:
            sys.exit(128 + SIGINT)
        except (ValueError, FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            leave(str(error), 2)
        except (OSError, ImportError) as error:
            full = "disk full: " if is_disk_full(error) else ""
            leave(full + " ".join(str(error).split()), 1)  # libraries break their lines
        except UserError as error:
            leave(str(error), 1)
        except Exception as error:
            reason = f"{error}: {error.__cause__}" if error.__cause__ else str(error)
            if is_disk_full(error):  # such as that of tokenizers, which is of no other type
                leave(f"disk full: {reason}", 1)
            # Errors of `datasets`, which is not imported here, since most programs do not need it.
            if not type(error).__module__.startswith("datasets."):
                raise
            leave(reason, 2)
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # of libraries in Rust, which is no Exception
                raise
            leave(f"A library failed with a file that it has read, such as tokenizer.json: {error}", 2)

    return reporting


def leave(message: str, status: int):
    """End the program with a line on stderr, which may not take the lone surrogates that a damaged file can name."""
    message = message.encode("utf-8", "backslashreplace").decode("utf-8")
    sys.stderr.write(f"error: {message}\n")
    end = SystemExit(f"error: {message}")
    end.code = status
    raise end from None


@contextmanager
def suggest_smaller(what: str, advice: str) -> Iterator[None]:
    """Turn all errors of failed allocations into a MemoryExceededError, with `advice`."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        first_line = (str(error) or type(error).__name__).splitlines()[0]
        raise MemoryExceededError(f"There is not enough memory for {what}: {advice} ({first_line}).") from error


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error is a failed allocation. Some libraries below PyTorch have messages of their own."""
    from accelerate.utils.memory import should_reduce_batch_size  # not installed with the package alone

    return (
        isinstance(error, MemoryError)
        or should_reduce_batch_size(error)
        or any(text in str(error) for text in ("bad_alloc", "MKL FFT error"))
    )
