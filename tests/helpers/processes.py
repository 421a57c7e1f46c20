"""Fresh Python processes without the seconds that their imports take.

A server process has imported what the libraries of Hugging Face stand on (torch, scipy, pandas, ...), and forks. A
child has arguments, environment, folder and output of its own. It imports transformers, datasets and this package
itself, as a new process does: variables such as HF_HOME, which are read then, have their effect.
"""

import atexit
import contextlib
import faulthandler
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Sequence
from multiprocessing.connection import Connection

import psutil

PRELOADED = (
    "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor", "torch.export", "torch.utils.data",
    "torchao.quantization", "scipy.optimize", "scipy.stats", "sklearn.metrics", "pandas", "pyarrow.dataset",
    "pyarrow.parquet", "numpy", "tokenizers", "regex", "yaml", "httpx", "requests", "aiohttp", "fsspec", "dill",
    "multiprocess", "jinja2", "matplotlib.pyplot", "PIL.Image", "safetensors.torch", "tqdm.auto", "psutil",
)  # fmt: skip
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(list(PRELOADED))
# Before any test has run: remote code that a test loads adds its folder to `sys.path`.
SEARCHED = list(sys.path)


class Process:
    """`python ...` that has begun; `command` is that of `subprocess`, with `sys.executable` in front."""

    def __init__(self, command: Sequence, env: dict[str, str] | None = None, cwd=None):
        assert command[0] == sys.executable, command
        self.args = [str(part) for part in command]
        self.files = [tempfile.TemporaryFile() for _ in range(2)]  # noqa: SIM115 - read as long as this object lives
        # Connections are what can be sent to a child of the server; these are closed after it has them.
        ends = [Connection(os.dup(file.fileno()), readable=False) for file in self.files]
        settings = (self.args[1:], dict(os.environ if env is None else env), str(cwd or os.getcwd()), SEARCHED, *ends)
        self.process = CONTEXT.Process(target=_child, args=settings)
        self.process.start()
        for end in ends:
            end.close()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.process.kill()
        self.process.join()

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def output(self) -> tuple[str, str]:
        """The output of the process on stdout and stderr so far."""
        return tuple(os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode() for file in self.files)

    def communicate(self, timeout: float = 600) -> tuple[str, str]:
        """Wait for its end.

        Raises:
            subprocess.TimeoutExpired: it has not come.
        """
        self.process.join(timeout)
        if self.process.exitcode is None:
            self.process.kill()
            raise subprocess.TimeoutExpired(self.args, timeout, *self.output())
        return self.output()

    def send_signal(self, number: int):
        os.kill(self.process.pid, number)

    def write_stacks(self):
        """Have it and the processes that it forked write on stderr what each of their threads does."""
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(self.process.pid)
            for one in [process, *process.children(recursive=True)]:
                one.send_signal(signal.SIGUSR1)
        time.sleep(1)


def run(command: Sequence, check: bool = False, **options) -> subprocess.CompletedProcess:
    """`subprocess.run` with both outputs as text; with `check`, it must end with the status 0."""
    with Process(command, **options) as process:
        out, err = process.communicate()
    assert not check or process.returncode == 0, err
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def _child(arguments: list[str], env: dict, cwd: str, searched: list[str], out: Connection, err: Connection):
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    os.dup2(out.fileno(), 1), os.dup2(err.fileno(), 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.register(signal.SIGUSR1, file=2)
    own = [folder for folder in env.get("PYTHONPATH", "").split(os.pathsep) if folder]
    sys.path[:] = own + [folder for folder in searched if folder not in own]
    try:
        _execute(arguments)
    finally:
        atexit._run_exitfuncs()


def _execute(arguments: list[str]):
    """As the interpreter does with `-c code`, `-m module` or a file."""
    first, *rest = arguments
    if first == "-c":
        code, sys.argv = rest[0], ["-c", *rest[1:]]
        sys.path.insert(0, "")
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        exec(compile(code, "<string>", "exec"), main.__dict__)
    elif first == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, os.path.dirname(os.path.abspath(first)))
        runpy.run_path(first, run_name="__main__")
