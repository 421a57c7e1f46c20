"""Measure what causal models remember and find: Copying, Delay, Recall, Passkey and others.

Copying and Delay, of the RTF paper, compare state sizes, of RTF or, with --config_overrides tno_type=s4d, of S4D: the
accuracy on the tokens to copy, and the error of one operator relative to the signal. With --variants every task
compares models: the accuracy on the tokens to find (Delay is then one of tokens), or the bits per byte of a text. A
task may have options of its own. A run whose result is in the output folder is not repeated. The recipes small-*
run in minutes on a CPU; copying and delay have the settings of the paper; mixers compares mixers, attention, Mamba-2
and Gated DeltaNet.

Example:
    python scripts/run_synthetic.py --recipe synthetic/small-copying --output_dir outputs/a
    python scripts/run_synthetic.py --recipe synthetic/mixers --dataset_name text.txt --output_dir outputs/mixers
    python scripts/run_synthetic.py --task recall:memory=8 passkey:memory=4 --length 64 --num_tokens 33 \\
        --variants fd:tno_type=fd mine:model=path/to/folder hers:model=module.Config,num_heads=4 --output_dir outputs/b
"""

import dataclasses
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING

from tnn_programs.cli.errors import importing, report_errors

from tnn_programs.cli.declared import DECLARED, start
from tnn_programs.cli.parser import option, parse_overrides, require
from tnn_programs.cli.task_arguments import ComparisonArguments

if TYPE_CHECKING:
    from modeling_tnn.configuration_tnn import TnnConfig

BY_STATE = ("copying", "delay")
# Task -> the least number of tokens, and the least length, with M = `memory`.
LEAST = {
    "copying": lambda m: (2, 0),
    "selective-copying": lambda m: (3, 2 * m + 1),
    "delay": lambda m: (2, m + 2),
    "recall": lambda m: (2 * m + 1, 3 * m + 1),
    "passkey": lambda m: (3, 2 * m + 2),
    "text": lambda m: (261, 2),
}


class TaskOptions(SimpleNamespace):
    """The options that a task can have for itself."""


@dataclass(kw_only=True)
class SyntheticArguments(ComparisonArguments):
    """The tasks and the models."""

    task: list[str] = option(metavar=f"{{{','.join(LEAST)}}}")
    state_sizes: list[int] = option([], "Numbers of states to compare, of rtf or s4d: copying and delay.")
    memory: int = option(1024, "Tokens to copy, steps of delay, pairs to recall, or tokens of a passkey.")
    num_tokens: int = option(64, "Size of the vocabulary, markers included; 261 for text in bytes.")
    length: int = 4000
    hidden_size: int = option(64, "Width of the model; for delay of a signal the number of channels.")
    num_hidden_layers: int = option(4, "Layers of the model; delay of a signal has one.")
    max_train_samples: int = 10_000
    max_eval_samples: int = 1_000

    def __post_init__(self):
        super().__post_init__()
        if self.task == [self.name] and self.name in LEAST:
            return self._check()
        for one in self.task:
            require(self, "task", one.partition(":")[0] in LEAST, f"one of {', '.join(LEAST)}")
        self.tasks()

    def _check(self):
        given = self.name in BY_STATE and not self.variants
        for name, needed in (("state_sizes", given), ("variants", not given)):
            self._require(name, bool(getattr(self, name)) == needed, "given" if needed else "left out")
        tokens, least = LEAST[self.name](self.memory)
        self._require("memory", self.memory >= 1, "at least 1")
        self._require("num_tokens", self.of_signals or self.num_tokens >= tokens, f"at least {tokens}")
        self._require("length", self.length >= least - self.of_signals, f"at least {least - self.of_signals}")
        fixed = self.of_signals or self.name == "copying"
        self._require("longer", not (fixed and self.longer), "left out")
        self._require("contexts", not (self.of_signals and self.contexts), "left out")
        self._require("longer", min(self.longer, default=least) >= least, f"at least {least}")
        longest = self.positions - 1
        fits = all(1 <= size <= longest for size in self.state_sizes)
        self._require("state_sizes", fits, f"at least 1 and at most {longest}")
        for variant in self.compared:
            self.variant_config(variant)

    def _require(self, name: str, holds: bool, allowed: str):
        require(self, name, holds, f"{allowed} for {self.name}")

    @property
    def name(self) -> str:
        """The first task."""
        return self.task[0].partition(":")[0]

    @property
    def of_signals(self) -> bool:
        """Whether the task is the delay of a signal by one operator."""
        return self.name == "delay" and not self.variants

    @property
    def positions(self) -> int:
        """The length of a row."""
        return 2 * self.memory + 1 if self.name == "copying" else self.length

    @property
    def compared(self) -> list[str]:
        """The variants, or one for each state size."""
        return self.variants or [f"{size}:rtf_state_size={size},s4d_state_size={size}" for size in self.state_sizes]

    def tasks(self) -> "list[tuple[SyntheticArguments, dict]]":
        """Of each task the arguments for it alone, and its own options of Trainer."""
        found, known = [], TaskOptions(**DECLARED["training"] | vars(self))
        for one in self.task:
            name, _, text = one.partition(":")
            given = parse_overrides(text, known, option=f"--task {name}")
            own = {option: given.pop(option) for option in list(given) if option in vars(self)}
            found.append((dataclasses.replace(self, **own, task=[name]), given))
        return found

    def build(self, fields: dict) -> "TnnConfig":
        with importing():
            from modeling_tnn.configuration_tnn import TnnConfig
        shared = {
            "vocab_size": self.num_tokens,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": 1 if self.of_signals else self.num_hidden_layers,
            "gtu_expansion": 1,
            "max_position_embeddings": self.positions,
            "hidden_dropout_prob": 0.0,
        }
        if not self.variants:
            shared |= {"tno_type": "rtf", "rtf_num_denominators": 1}
            shared |= {"rtf_initializer": "montel", "rtf_constraint": None}
        return TnnConfig(**shared | fields)


@report_errors
def main():
    start(SyntheticArguments, __doc__, "run_synthetic")


if __name__ == "__main__":
    main()
