"""Run the experiments that a CPU is too slow for, each meant for nine minutes of an H100, and write one JSON each.

`--text` is the folder of the language models: train.parquet and validation.parquet, the novels and articles that
`texts.py` writes as `small-causal`, and `tokenizer`, made of them unless it is there. An experiment whose JSON stands
in --output_dir is left out, and a training that was ended goes on from its last checkpoint, so that the same command
again does the rest; the others start anew. Experiments that measure time run alone, the others --jobs at a
time. --quick runs them with tiny sizes on a CPU: a test of the program.

Example:
    python docs/research/gpu.py --list
    python docs/research/gpu.py --text texts/small-causal --output_dir outputs/gpu --minutes 9 --jobs 3
    python docs/research/gpu.py --text texts/small-causal --output_dir outputs/gpu --only lm-rpe copying
"""

import argparse
import json
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from datasets import Dataset

from modeling_tnn import __version__
from modeling_tnn.data.text import train_tokenizer
from tnn_programs.cli.atomic import write_json

PROGRAM = Path(__file__).parents[2] / "scripts" / "tnn.py"
BENCHMARK = Path(__file__).parent / "benchmark.py"
VOCABULARY = 32768
RATES = ("1e-3", "2e-3", "4e-3")
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
    # PyTorch's scan makes 9,300 tokens a second and keeps 38 GB for 8,192: an hour, in seven parts.
    "mamba2": (
        "mamba2-tiny",
        "hidden_size=512,num_hidden_layers=14,num_heads=16,head_dim=64",
        ("--per_device_train_batch_size", 16, "--gradient_accumulation_steps", 2),
    ),
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
        options: its command and options; "{out}" is the folder of the experiment, "{text}" that of the text, "{lra}"
            that of the Long Range Arena.
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


def language_model(name: str, rate: str, seed: int = 0) -> Experiment:
    """1,800 steps of 32 blocks of 512: 29.5 million tokens."""
    preset, fields, more = MODELS[name]
    fields = ",".join(filter(None, ["hidden_dropout_prob=0.0" if preset.startswith("tnn") else "", fields]))
    tiny = ",".join(filter(None, [fields, TINY[preset.split("-")[0]]]))
    options = {"objective": "clm", "config_name": preset, "config_overrides": fields}
    options |= {"train_file": "{text}/train.parquet", "validation_file": "{text}/validation.parquet"}
    options |= {"documents": "rows", "tokenizer_name": "{text}/tokenizer", "vocab_size": VOCABULARY, "block_size": 512}
    options |= {"per_device_train_batch_size": 32, "per_device_eval_batch_size": 32, "max_eval_blocks": 400}
    options |= {"max_steps": 1800, "learning_rate": rate, "lr_scheduler_type": "cosine", "warmup_steps": 0.1}
    options |= {"seed": seed, "mixed_precision": "bf16", "eval_steps": 600, "checkpointing_steps": 600}
    options |= {"save_total_limit": 1, "output_dir": "{out}"}
    quick = {"config_overrides": tiny, "block_size": 16, "per_device_train_batch_size": 2, "max_steps": 2}
    quick |= {"max_eval_blocks": 2, "eval_steps": 2, "checkpointing_steps": 2}
    about = f"{name} of the paper's size at a peak rate of {rate}, seed {seed} (TNN table 2)"
    options = ("pretrain", *words(options), *more)
    return Experiment(about, options, "metrics.json", (*words(quick), "--use_cpu"), resumes=True)


def copying(states: int) -> Experiment:
    options = {"recipe": "synthetic/copying-s4", "state_sizes": states, "output_dir": "{out}"}
    options |= {"per_device_train_batch_size": 32, "bf16": "true", "num_train_epochs": 5}
    quick = {"state_sizes": 4, "hidden_size": 16, "num_hidden_layers": 1, "memory": 8, "max_train_samples": 16}
    quick |= {"max_eval_samples": 8, "num_train_epochs": 1, "use_cpu": "true", "bf16": "false"}
    about = f"Copying at width 1,024 with {states} states, 5 of its 50 epochs (RTF table 2)"
    return Experiment(about, ("synthetic", *words(options)), "all_results.json", words(quick))


def long_range_arena(task: str, **data) -> Experiment:
    """The recipe of the TNN paper: 50,000 steps, in parts."""
    options = {"recipe": f"lra/tnn-{task}", "bf16": "true", "output_dir": "{out}"} | data
    quick = {"config_overrides": TINY["tnn"], "max_train_samples": 8, "max_eval_samples": 4, "max_steps": 2}
    quick |= {"per_device_train_batch_size": 2, "eval_steps": 2, "save_steps": 2, "use_cpu": "true", "bf16": "false"}
    about = f"{task} of the Long Range Arena at the settings of the paper (TNN table 4)"
    return Experiment(about, ("lra", *words(options)), "all_results.json", words(quick), resumes=True)


def benchmark(about: str, *options, quick: tuple) -> Experiment:
    options = (*options, "--output_file", "{out}/figures.json")
    quick = ("--device", "cpu", *quick)
    return Experiment(about, options, "figures.json", quick, measures_time=True, program=BENCHMARK)


def experiments() -> dict[str, Experiment]:
    """In the order in which they are worth running."""
    variants = [name for name in MODELS if name.startswith("rpe-")]
    models = {f"lm-{name}-{rate}": language_model(name, rate) for rate in RATES for name in MODELS}
    later = {name: models.pop(name) for name in list(models) if name.startswith(tuple(f"lm-{v}" for v in variants))}
    seeds = {f"lm-{name}-2e-3-seed-1": language_model(name, "2e-3", 1) for name in MODELS}
    lengths, sizes = ("--length", 1024, 4096, 16384), ("--state_sizes", 4, 16, 64, 256)
    ways = ("released-6", "released-3", "rpe-6", "rpe-3", "fd-3", "rtf")
    return {
        "state-size": benchmark(
            "a layer by its number of states (RTF tables 6 and 7, figures 1, 3, 5)",
            *("state_size", *lengths, *sizes, "--largest_scan", 64),
            quick=("--length", 64, "--state_sizes", 4, "--repeats", 1),
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
        "lra-listops": long_range_arena("listops"),
        "lra-text": long_range_arena("text", dataset_path="{lra}"),
    }


def prepare(text: Path):
    """Make the tokenizer of the language models unless it is there."""
    if not (text / "tokenizer").is_dir():
        tokenizer = train_tokenizer(Dataset.from_parquet(str(text / "train.parquet")), VOCABULARY)
        tokenizer.save_pretrained(text / "tokenizer")


def command_of(experiment: Experiment, args: argparse.Namespace, folder: Path) -> list[str]:
    """The command line; of an option that is given twice, the last one counts."""
    options = [*experiment.options, *(experiment.quick if args.quick else ())]
    if experiment.resumes:
        options += ["--resume_from_checkpoint", "auto"]
    texts = [str(option).format(out=folder, text=args.text, lra=args.lra) for option in options]
    return [sys.executable, str(experiment.program), *texts]


def run(name: str, args: argparse.Namespace, end: float) -> str:
    """Run an experiment unless its figures are there; what came of it, in a line."""
    experiment, folder, file = experiments()[name], args.output_dir / name, args.output_dir / f"{name}.json"
    if file.exists():
        return "was there"
    start = time.monotonic()
    if start >= end:
        return "no time was left for it"
    folder.mkdir(parents=True, exist_ok=True)
    with (args.output_dir / f"{name}.log").open("a") as log:
        try:
            command = command_of(experiment, args, folder)
            subprocess.run(command, stdout=log, stderr=log, check=True, timeout=end - start)  # noqa: S603 - our own
        except subprocess.TimeoutExpired:
            return "was ended; the same command " + ("goes on with it" if experiment.resumes else "starts it anew")
        except subprocess.CalledProcessError as error:
            return f"failed with the status {error.returncode}, see {log.name}"
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    record = {"experiment": name, "about": experiment.about, "device": device, "torch": torch.__version__}
    record |= {"package": __version__, "date": time.strftime("%F"), "quick": args.quick, "jobs": args.jobs}
    record |= {"seconds": round(time.monotonic() - start, 1)}
    write_json(file, record | {"figures": json.loads((folder / experiment.figures).read_text())})
    return f"{record['seconds']} s"


def run_all(names: list[str], args: argparse.Namespace) -> dict[str, str]:
    """Those that measure time first, one after the other, then the others side by side."""
    end, known, found, lock = time.monotonic() + 60 * args.minutes, experiments(), {}, threading.Lock()

    def one(name: str):
        outcome = run(name, args, end)
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
    parser.add_argument("--minutes", type=float, default=9, help="What is running then is ended.")
    parser.add_argument("--jobs", type=int, default=1, help="Experiments at a time, but for those that measure time.")
    parser.add_argument("--text", type=Path, help="Folder of the text of the language models.")
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
    if "lra-text" in names and args.lra is None:
        parser.error("--lra is needed by lra-text")
    if any("failed" in outcome for outcome in run_all(names, args).values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
