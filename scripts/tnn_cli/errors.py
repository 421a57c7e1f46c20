"""What a program tells its user: an error in one line, the next commands, a table.

An error that its user can solve ends a program with one line, a mistake of the program with a traceback. This module
is imported first (isort's `force-to-top`), because some libraries log messages while they are imported.
"""

import errno
import functools
import json
import logging
import os
import shutil
import signal
import sys
import threading
from _thread import interrupt_main
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from signal import SIGINT

# transformers imports torchao if it is installed. torchao warns that it lacks code for other devices, and PyTorch that
# torchao uses deprecated functions. Neither concerns the program.
for _imported in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_imported).setLevel(logging.ERROR)
# These libraries log each attempt to reach the Hub, or a damaged file, and then raise an error that says the same.
QUIET = {"huggingface_hub": logging.ERROR, "datasets": logging.CRITICAL}
# How libraries that give no number say that a file cannot grow; the last two are torch.save's.
NO_SPACE = ("No space left", "Disk quota exceeded", "File too large", "unexpected pos", "failed writing file")


def is_disk_full(error: BaseException | None) -> bool:
    """Whether an error or its cause is a lack of space. A limit of file sizes ends a write in the same way."""
    while error is not None:
        numbers = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        if getattr(error, "errno", None) in numbers or any(text in str(error) for text in NO_SPACE):
            return True
        error = error.__cause__ or error.__context__
    return False


class UserError(RuntimeError):
    """An error that the user of a program can solve. Its message says how."""


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
def importing(extra: str | None = None) -> Iterator[None]:
    """Import what a program computes with, after its command line is read. Ctrl-C ends the process at once.

    Libraries that are interrupted while they are imported raise any error, or write tracebacks.

    Args:
        extra: the extra of the package that brings what the program needs besides PyTorch and transformers.

    Raises:
        ImportError: a package is not installed; the message says how to install it.
    """
    # Ctrl-C is ignored in what a shell runs in the background, and another thread cannot change that.
    in_main_thread = threading.current_thread() is threading.main_thread()
    replaced = signal.getsignal(SIGINT) is signal.default_int_handler and in_main_thread
    if replaced:
        signal.signal(SIGINT, lambda *_: os._exit(128 + SIGINT))
    try:
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
            # Errors of `datasets`, which is not imported here, since most programs do not need it.
            if not type(error).__module__.startswith("datasets."):
                raise
            if is_disk_full(error):
                leave(f"disk full: {error}: {error.__cause__}", 1)
            leave(f"{error}: {error.__cause__}", 2)

    return reporting


def leave(message: str, status: int):
    """End the program with a line on stderr."""
    sys.stderr.write(f"error: {message}\n")
    end = SystemExit(f"error: {message}")
    end.code = status
    raise end from None


class MemoryExceededError(UserError):
    """The error for a lack of memory. Its message names options that help."""


@contextmanager
def suggest_smaller(what: str, advice: str) -> Iterator[None]:
    """Turn all errors of failed allocations into one, whose message names options that help.

    Raises:
        MemoryExceededError: the machine or an accelerator ran out of memory in the block.
    """
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


def read_lines() -> Iterator[str]:
    """The lines of the standard input until an empty one or the end; a terminal shows where to write.

    Raises:
        ValueError: a line is not UTF-8.
    """
    mark = "\ufeff"  # of a file that is redirected
    while True:
        sys.stdout.write("> " if sys.stdin.isatty() else "")
        sys.stdout.flush()
        line = sys.stdin.readline().removesuffix("\n").removeprefix(mark)
        mark = ""
        if not line.strip():
            return
        check_text("a line", line)
        yield line


def check_text(name: str, text: str):
    """Refuse what no tokenizer takes: lone surrogates, as which Python reads bytes that are not UTF-8.

    Raises:
        ValueError: there are some.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} must be text in UTF-8, got {ascii(text[:100])}") from error


# Errors: lower is better, and they are not printed in percent.
ERRORS = {"mse"}


def format_metric(name: str, value: float) -> str:
    """The text of a score in percent, or of an error in its own unit."""
    return f"{value:.4g}" if name in ERRORS else f"{100 * value:.2f}"


def markdown_table(headers: Sequence[str], rows: Iterable[Sequence[str]], texts: int = 1) -> str:
    """A table with `texts` columns of text, aligned left, before the columns of numbers, aligned right."""
    sides = ["left"] * texts + ["right"] * (len(headers) - texts)
    from tabulate import tabulate

    return tabulate(list(rows), list(headers), "pipe", disable_numparse=True, colalign=sides)


# Subcommand -> (module of a program, summary).
COMMANDS = {
    "demo": ("demo", "train a small model on real text, save it, load it and let it write"),
    "presets": ("presets", "list the presets and recipes, with sizes, learning rates and minutes"),
    "pretrain": ("pretrain", "pretrain a causal or masked language model, on one device or many"),
    "finetune-glue": ("finetune_glue", "fine-tune on GLUE tasks or on files of sentences with labels"),
    "plan": ("plan", "estimate memory and speed of a training step on GPUs"),
    "evaluate": ("evaluate_lm", "measure perplexity by the length of the context"),
    "generate": ("generate", "continue prompts"),
    "chat": ("chat", "chat with a model in the terminal"),
    "serve": ("serve", "serve a web page that continues texts and shows the kernels of a model"),
    "api": ("api", "serve the routes of OpenAI's API to many clients at once"),
    "plot-kernels": ("plot_kernels", "draw the kernels of a model"),
    "to-recurrent": ("to_recurrent", "convert a causal model to a recurrence of low order"),
    "convert": ("convert_original", "convert a checkpoint of the released implementations"),
    "push": ("push_to_hub", "publish a model with its card on the Hub"),
    "card": ("model_card", "write the card of a model"),
    "lra": ("run_lra", "train on a task of the Long Range Arena"),
    "images": ("run_image_classification", "train an image classifier"),
    "synthetic": ("run_synthetic", "train on synthetic tasks: copying, delay, recall, passkey"),
    "ablation": ("run_ablation", "compare variants of a model"),
    "benchmark": ("benchmark", "compare speed and memory with peers"),
}
# Suggestions for a trained model: subcommands with their options.
OF_TNN = ("plot-kernels --model_name_or_path {folder} --output_dir {folder}/kernels",)
CLASSIFY = (
    "{python} -c 'import modeling_tnn, transformers; "
    'print(transformers.pipeline("text-classification", model="{folder}")(TEXT))\''
)
LAST_STEP = ("push {folder} --repo_id USER/NAME",)
FIRST_STEP = {
    "causal": (
        'generate --model_name_or_path {folder} --prompt "{prompt}"',
        "serve --model_name_or_path {folder}",
    ),
    "unstable": ('generate --model_name_or_path {folder} --prompt "{prompt}" --use_cache false',),
    "masked": ("finetune-glue --model_name_or_path {folder} --task_name sst2 --do_train --output_dir outputs/sst2",),
    "dna": (
        "finetune-glue --model_name_or_path {folder} --do_train --do_eval "
        "--dataset_name katarinagresova/Genomic_Benchmarks_human_enhancers_cohn --output_dir outputs/enhancers",
    ),
    "classifier": (),
    "sentences": (CLASSIFY.replace("TEXT", '"A sentence."'),),
    "pairs": (CLASSIFY.replace("TEXT", '{{"text": "A sentence.", "text_pair": "Another one."}}'),),
}
UNSTABLE = (
    "The training ended with poles outside the unit circle: {layers}. Longer texts may overflow, and none can be "
    "continued from a cache. Train again with --config_overrides rtf_constraint=l1_montel, the default of new "
    "configurations, or with --max_pole_radius 0.99.\n"
)
COMMAND_OF = {module: command for command, (module, _) in COMMANDS.items()}


def next_steps(folder: str, kind: str, unstable: Sequence[object] = (), prompt: str = "In the beginning") -> str:
    """The next commands for the model in `folder`, one on each line.

    Args:
        kind: causal, masked, dna (a masked model of it) or classifier, or what a classifier of text reads: sentences
            or pairs.
        unstable: layers with poles outside the unit circle. The text begins with what they prevent.
        prompt: what a causal model is to continue.
    """
    config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    steps = FIRST_STEP["unstable" if unstable and kind == "causal" else kind]
    steps += (OF_TNN if config["model_type"] == "tnn" else ()) + LAST_STEP
    # `make demo` runs in a virtual environment that is not active in the user's shell.
    tool = "tnn" if shutil.which("tnn") else str(Path(sys.executable).with_name("tnn"))
    python = "python" if tool == "tnn" else sys.executable
    warning = UNSTABLE.format(layers="; ".join(map(str, unstable))) if unstable else ""
    lines = [step if step.startswith("{python} ") else f"{tool} {step}" for step in steps]
    return f"{warning}next:\n" + "\n".join(
        f"    {line.format(folder=folder, python=python, prompt=prompt)}" for line in lines
    )
