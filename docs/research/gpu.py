"""Run the experiments that a CPU is too slow for, each meant for nine minutes of an H100, and write one JSON each.

`--text` is the folder of the language models: train.parquet and validation.parquet, the novels and articles that
`texts.py` writes as `small-causal`, and `tokenizer`, made of them unless it is there. `--corpus` is the folder that
`debian_texts.py` writes, for those of 500 million tokens. An experiment whose JSON stands in --output_dir is left out.
After --minutes what runs is asked to end: a training writes a checkpoint in its folder, with which the same command
goes on, to the same figures as without a stop; so do `lengths`, by rows, and the others start anew. Experiments that
measure time run alone, the others --jobs at a time. --quick runs them with tiny sizes on a CPU: a test of the program.

Example:
    python docs/research/gpu.py --list
    python docs/research/gpu.py --text texts/small-causal --output_dir outputs/gpu --minutes 9 --jobs 3
    python docs/research/gpu.py --text texts/small-causal --output_dir outputs/gpu --only lm-rpe copying
    python docs/research/gpu.py --corpus texts/debian --lra lra --only lra- long-lm --jobs 6
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, NamedTuple

import torch
from datasets import Dataset

from modeling_tnn import __version__
from modeling_tnn.data.text import train_tokenizer
from tnn_programs.cli.atomic import write_json

PROGRAM = Path(__file__).parents[2] / "scripts" / "tnn.py"
BENCHMARK = Path(__file__).parent / "benchmark.py"
VOCABULARY = 32768
RATES = ("1e-3", "2e-3", "4e-3")
GRACE = 60  # seconds in which a training that is asked to end writes its checkpoint
ATTENTION = "layer_types=[toeplitz,full_attention,toeplitz,toeplitz,toeplitz,full_attention,toeplitz]"
# Preset, fields and further options; 37 to 40 million parameters each, with the vocabulary.
MODELS = {
    "rpe": ("tnn-causal", "", ()),
    "rpe-papers-start": ("tnn-causal", "initializer=torch", ()),
    "rpe-learned-decay": ("tnn-causal", "decay=0.01,learnable_decay=true", ("--operator_weight_decay", 0)),
    "rpe-no-decay": ("tnn-causal", "decay=1.0", ()),
    "fd": ("tnn-causal-fd", "", ()),
    "rtf": ("tnn-causal-rtf", "", ()),
    "hybrid": ("tnn-causal", ATTENTION, ()),
    "rotary": (
        "llama-tiny",
        "hidden_size=512,num_hidden_layers=7,num_attention_heads=8,num_key_value_heads=8,head_dim=64,intermediate_size=1440",
        (),
    ),
    "alibi": ("bloom-tiny", "hidden_size=512,n_layer=7,n_head=8", ()),
    # PyTorch's scan makes 9,300 tokens a second: an hour for 29.5 million, in seven parts.
    "mamba2": ("mamba2-tiny", "hidden_size=512,num_hidden_layers=14,num_heads=16,head_dim=64", ()),
}
MULTIHYENA = "toeplitz_mixer=multihyena,tno_type=hyena,num_mixer_heads=256,gtu_expansion=1,intermediate_size=1365"
# Models that see 500 million tokens, at the best rate of `lm-`; of multihyena the paper's, of mamba2 a guess.
LONG = {"rpe": "2e-3", "fd": "2e-3", "rtf": "4e-3", "multihyena": "1e-3", "hybrid": "1e-3", "alibi": "2e-3"}
LONG |= {"rotary": "1e-3", "mamba2": "2e-3"}
LARGEST_PASS = {"mamba2": 16}  # blocks: PyTorch's scan keeps 38 GB for 8,192 tokens
# Recipe and fields of the classifiers; that of FD is the TNN with its three layers.
CLASSIFIERS = {
    "rtf": ("rtf-s4", ""),
    "tnn": ("tnn", ""),
    "fd": ("tnn", "tno_type=fd,rpe_layers=3"),
    "s4d": ("s4d", ""),
}
TINY = {
    "tnn": "hidden_size=16,gtu_expansion=1,intermediate_size=16,rpe_dim=8",
    "llama": "hidden_size=16,num_attention_heads=2,num_key_value_heads=2,head_dim=8,intermediate_size=16",
    "bloom": "hidden_size=16,n_head=2",
    "mamba2": "hidden_size=16,num_hidden_layers=2,num_heads=4,head_dim=8",
}


class Experiment(NamedTuple):
    """A run of a program.

    Attributes:
        about: what it is for.
        options: its command and options; "{out}" is the folder of the experiment, "{text}", "{corpus}" and "{lra}" are
            those of the options.
        figures: the JSON that it writes in its folder.
        quick: options that follow for a test.
        measures_time: nothing else may run beside it.
        resumes: it goes on from its last checkpoint.
        program: `tnn`, or another one.
    """

    about: str
    options: tuple
    figures: str
    quick: tuple
    measures_time: bool = False
    resumes: bool = False
    program: Path = PROGRAM


def words(options: dict) -> tuple:
    """A command line: `{"seed": 0}` as `--seed 0`."""
    return tuple(word for name, value in options.items() for word in (f"--{name}", value))


def language_model(name: str, rate: str, seed: int = 0, long: bool = False) -> Experiment:
    """1,800 steps of 32 blocks of 512, 29.5 million tokens; `long`, 7,630 of the papers' 128, 500 million."""
    preset, fields, more = (MODELS | {"multihyena": ("tnn-causal", MULTIHYENA, ())})[name]
    fields = ",".join(filter(None, ["hidden_dropout_prob=0.0" if preset.startswith("tnn") else "", fields]))
    tiny = ",".join(filter(None, [fields, TINY[preset.split("-")[0]], "num_mixer_heads=8" * (name == "multihyena")]))
    options = {"objective": "clm", "config_name": preset, "config_overrides": fields}
    if long:
        options |= {"dataset_name": "{corpus}/text", "tokenizer_name": "{corpus}/tokenizer"}
    else:
        options |= {"train_file": "{text}/train.parquet", "validation_file": "{text}/validation.parquet"}
        options |= {"tokenizer_name": "{text}/tokenizer"}
    blocks, steps, every = (128, 7630, 1526) if long else (32, 1800, 600)
    size = min(blocks, LARGEST_PASS.get(name, blocks))
    options |= {"documents": "rows", "vocab_size": VOCABULARY, "block_size": 512}
    options |= {"per_device_train_batch_size": size, "gradient_accumulation_steps": blocks // size}
    options |= {"per_device_eval_batch_size": 32, "max_eval_blocks": 400}
    options |= {"max_steps": steps, "learning_rate": rate, "lr_scheduler_type": "cosine", "warmup_steps": 0.1}
    options |= {"seed": seed, "mixed_precision": "bf16", "eval_steps": every, "checkpointing_steps": every}
    options |= {"save_total_limit": 1, "output_dir": "{out}"}
    quick = {"config_overrides": tiny, "block_size": 16, "per_device_train_batch_size": 2, "max_steps": 2}
    quick |= {"gradient_accumulation_steps": 1, "max_eval_blocks": 2, "eval_steps": 2, "checkpointing_steps": 2}
    seen = "500 million tokens" if long else "TNN table 2"
    about = f"{name} of the paper's size at a peak rate of {rate}, seed {seed} ({seen})"
    options = ("pretrain", *words(options), *more)
    return Experiment(about, options, "metrics.json", (*words(quick), "--use_cpu"), resumes=True)


def copying(states: int) -> Experiment:
    options = {"recipe": "synthetic/copying-s4", "state_sizes": states, "output_dir": "{out}"}
    options |= {"per_device_train_batch_size": 32, "bf16": "true", "num_train_epochs": 5}
    quick = {"state_sizes": 4, "hidden_size": 16, "num_hidden_layers": 1, "memory": 8, "max_train_samples": 16}
    quick |= {"max_eval_samples": 8, "num_train_epochs": 1, "use_cpu": "true", "bf16": "false"}
    about = f"Copying at width 1,024 with {states} states, 5 of its 50 epochs (RTF table 2)"
    return Experiment(about, ("synthetic", *words(options)), "all_results.json", words(quick))


def long_range_arena(task: str, model: str, seed: int) -> Experiment:
    """The recipe of a paper, in parts; its checkpoints take 6 to 16 MB."""
    recipe, fields = CLASSIFIERS[model]
    options = {"recipe": f"lra/{recipe}-{task}", "seed": seed, "bf16": "true", "output_dir": "{out}"}
    options |= {"eval_steps": 10_000, "save_steps": 5_000, "save_total_limit": 1}
    options |= {"config_overrides": fields} if fields else {}
    options |= {"dataset_path": "{lra}"} if task == "text" else {}
    tiny = "tno_type=s4d,s4d_state_size=4,hidden_size=16" if model == "s4d" else "hidden_size=16,num_hidden_layers=1"
    quick = {"config_overrides": ",".join(filter(None, [fields, tiny])), "max_train_samples": 8, "max_eval_samples": 4}
    quick |= {"per_device_train_batch_size": 2, "max_steps": 2, "warmup_steps": 1, "eval_steps": 2, "save_steps": 2}
    quick |= {"use_cpu": "true", "bf16": "false"}
    about = f"{model} on {task} at the settings of the paper, seed {seed} (TNN table 4, SKI table 2, RTF table 1)"
    return Experiment(about, ("lra", *words(options)), "all_results.json", words(quick), resumes=True)


def benchmark(about: str, *options, quick: tuple, resumes: bool = False) -> Experiment:
    options = (*options, "--output_file", "{out}/figures.json")
    quick = ("--device", "cpu", *quick)
    return Experiment(about, options, "figures.json", quick, measures_time=True, resumes=resumes, program=BENCHMARK)


def experiments() -> dict[str, Experiment]:
    """In the order in which they are worth running."""
    variants = [name for name in MODELS if name.startswith("rpe-")]
    models = {f"lm-{name}-{rate}": language_model(name, rate) for rate in RATES for name in MODELS}
    later = {name: models.pop(name) for name in list(models) if name.startswith(tuple(f"lm-{v}" for v in variants))}
    seeds = {f"lm-{name}-2e-3-seed-1": language_model(name, "2e-3", 1) for name in MODELS}
    lengths, sizes = ("--length", 1024, 4096, 16384), ("--state_sizes", 4, 16, 64, 256)
    ways = ("released-6", "released-3", "rpe-6", "rpe-3", "fd-3", "rtf")
    tasks = [
        (seed, task, model) for seed in range(3) for task in ("listops", "text", "pathfinder") for model in CLASSIFIERS
    ]
    return {
        "lengths": benchmark(
            "a step and a prefill of one row of 8,192 to 1,048,576 positions, and where models stop",
            "lengths",
            quick=("--ways", "rpe", "gpt2", "--lengths", 64, "--hidden_size", 16, "--num_hidden_layers", 1),
            resumes=True,
        ),
        "state-size": benchmark(
            "a layer by its number of states (RTF tables 6 and 7, figures 1, 3, 5)",
            *("state_size", *lengths, *sizes, "--largest_scan", 64),
            quick=("--length", 64, "--state_sizes", 4, "--repeats", 1),
        ),
        "serving": benchmark(
            "64 streams by the scheduler, one and eight tokens of each a step",
            *("serving", "--models", "rpe", "rtf", "--requests", 64, "--tokens_per_launch", 1, 8, "--new_tokens", 256),
            quick=("--models", "rpe", "--requests", 3, "--hidden_size", 16, "--num_hidden_layers", 1, "--repeats", 1),
        ),
        "fd-speed": benchmark(
            "steps of FD beside the released form and RPE, and RTF (SKI figure 1b: FD 10 to 15% faster)",
            *("training", "--ways", *ways, *(f"{way} bf16" for way in ways), "--decay", 1),
            *("--num_hidden_layers", 6, "--tokens", 16384, "--lengths", 512, 2048, 8192),
            quick=("--lengths", 32, "--tokens", 32, "--hidden_size", 16, "--repeats", 1),
        ),
        "long-range": benchmark(
            "steps per second of classifiers by length (TNN table 5)",
            *("long_range", "--models", "rpe", "fd", "ski", "rtf", "s4d"),
            *("transformer", "reformer", "nystromformer", "fnet"),
            quick=("--lengths", 64, "--repeats", 1),
        ),
        **models,
        "copying-64": copying(64),
        "copying-256": copying(256),
        **later,
        **seeds,
        **{f"lra-{task}-{model}-{seed}": long_range_arena(task, model, seed) for seed, task, model in tasks},
        **{f"long-lm-{name}-{seed}": language_model(name, rate, seed, long=True)
           for seed in range(2) for name, rate in LONG.items()},
    }  # fmt: skip


def prepare(text: Path):
    """Make the tokenizer of the language models unless it is there."""
    if not (text / "tokenizer").is_dir():
        tokenizer = train_tokenizer(Dataset.from_parquet(str(text / "train.parquet")), VOCABULARY)
        tokenizer.save_pretrained(text / "tokenizer")


def command_of(experiment: Experiment, args: argparse.Namespace, folder: Path) -> list[str]:
    """The command line; of an option that is given twice, the last one counts."""
    options = [*experiment.options, *(experiment.quick if args.quick else ())]
    if experiment.resumes and experiment.program == PROGRAM:
        options += ["--resume_from_checkpoint", "auto"]
    texts = [str(option).format(out=folder, text=args.text, lra=args.lra, corpus=args.corpus) for option in options]
    return [sys.executable, str(experiment.program), *texts]


def run_until(command: list[str], log: IO, over: threading.Event) -> int | None:
    """The exit status of a command; None if it was asked to end, because the time is `over`."""
    process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)  # noqa: S603 - our own
    try:
        while process.poll() is None and not over.wait(0.2):
            pass
        if process.returncode is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)
            return None
        return process.returncode
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # and those that it started


def run(name: str, args: argparse.Namespace, over: threading.Event) -> str:
    """Run an experiment unless its figures are there; what came of it, in a line."""
    experiment, folder, file = experiments()[name], args.output_dir / name, args.output_dir / f"{name}.json"
    if file.exists():
        return "was there"
    start = time.monotonic()
    if over.is_set():
        return "no time was left for it"
    folder.mkdir(parents=True, exist_ok=True)
    with (args.output_dir / f"{name}.log").open("a") as log:
        status = run_until(command_of(experiment, args, folder), log, over)
    if status is None:
        return "was ended; the same command " + ("goes on with it" if experiment.resumes else "starts it anew")
    if status:
        return f"failed with the status {status}, see {log.name}"
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    record = {"experiment": name, "about": experiment.about, "device": device, "torch": torch.__version__}
    record |= {"package": __version__, "date": time.strftime("%F"), "quick": args.quick, "jobs": args.jobs}
    record |= {"seconds": round(time.monotonic() - start, 1)}
    write_json(file, record | {"figures": json.loads((folder / experiment.figures).read_text())})
    return f"{record['seconds']} s"


def run_all(names: list[str], args: argparse.Namespace) -> dict[str, str]:
    """Those that measure time first, one after the other, then the others side by side."""
    over, known, found, lock = threading.Event(), experiments(), {}, threading.Lock()
    timer = threading.Timer(60 * args.minutes, over.set)
    timer.daemon = True
    timer.start()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: over.set())

    def one(name: str):
        outcome = run(name, args, over)
        with lock:
            found[name] = outcome
            sys.stderr.write(f"{name}: {outcome}\n")

    for name in names:
        if known[name].measures_time:
            one(name)
    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(one, [name for name in names if not known[name].measures_time]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="Print the names of all experiments.")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="Run those whose names begin with one of these.")
    parser.add_argument("--minutes", type=float, default=9, help="What is running then is asked to end.")
    parser.add_argument("--jobs", type=int, default=1, help="Experiments at a time, but for those that measure time.")
    parser.add_argument("--text", type=Path, help="Folder of the text of the language models.")
    parser.add_argument("--corpus", type=Path, help="Folder of the text of the language models of 500 million tokens.")
    parser.add_argument("--lra", help="Folder or Hub id of a data set with the configuration imdb.")
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/gpu-experiments"))
    parser.add_argument("--quick", action="store_true", help="Tiny sizes, on a CPU.")
    args = parser.parse_args()
    known = experiments()
    names = [name for name in known if not args.only or name.startswith(tuple(args.only))]
    if not names:
        parser.error(f"--only must name the beginning of one of {', '.join(known)}")
    if args.list:
        print("\n".join(f"{name:28} {known[name].about}" for name in names))
        return
    if any(name.startswith("lm-") for name in names):
        if args.text is None:
            parser.error("--text is needed by the language models")
        prepare(args.text)
    for begin, option in (("lra-text", "lra"), ("long-lm", "corpus")):
        if getattr(args, option) is None and any(name.startswith(begin) for name in names):
            parser.error(f"--{option} is needed by {begin}")
    if any("failed" in outcome for outcome in run_all(names, args).values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
