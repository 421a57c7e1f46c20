"""Measure what causal models remember and find: Copying, Delay, Recall and Passkey.

Copying and Delay, of the RTF paper, compare state sizes, of RTF or, with --config_overrides tno_type=s4d, of S4D: the
accuracy on the tokens to copy, and the error of one operator relative to the signal. Recall and Passkey compare any
configurations, such as hybrids with attention, by the accuracy on the tokens to find. The recipes small-* run in
minutes on a CPU; copying and delay have the settings of the paper.

Example:
    python scripts/run_synthetic.py --recipe synthetic/small-copying --output_dir outputs/a
    python scripts/run_synthetic.py --recipe synthetic/small-recall --output_dir outputs/b
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tnn_programs.cli.errors import importing, report_errors

from tnn_programs.cli.declared import start
from tnn_programs.cli.parser import option, parse_overrides, require
from tnn_programs.cli.task_arguments import ComparisonArguments

if TYPE_CHECKING:
    from modeling_tnn.configuration_tnn import TnnConfig

BY_STATE = ("copying", "delay")


@dataclass(kw_only=True)
class SyntheticArguments(ComparisonArguments):
    """The task and the models."""

    task: str = option(choices=(*BY_STATE, "recall", "passkey"))
    state_sizes: list[int] = option([], "Numbers of states to compare, of rtf or s4d: copying and delay.")
    memory: int = option(1024, "Tokens to copy, steps of delay, pairs to recall, or tokens of a passkey.")
    num_tokens: int = option(64, "Size of the vocabulary, markers included.")
    length: int = 4000
    hidden_size: int = option(64, "Width of the model; for delay the number of channels.")
    num_hidden_layers: int = option(4, "Layers of the model; delay has one.")
    rtf_initializer: str = option("montel", "Initial coefficients: zeros, xavier or montel.")
    rtf_constraint: str | None = option(None, "l1_montel keeps poles in the unit circle.")
    max_train_samples: int = 10_000
    max_eval_samples: int = 1_000

    def __post_init__(self):
        super().__post_init__()
        for name, needed in (("state_sizes", self.by_state), ("variants", not self.by_state)):
            self._require(name, bool(getattr(self, name)) == needed, "given" if needed else "left out")
        tokens, least = {
            "copying": (0, 0),
            "delay": (0, self.memory + 1),
            "recall": (2 * self.memory + 1, 3 * self.memory + 1),
            "passkey": (3, 2 * self.memory + 2),
        }[self.task]
        self._require("memory", self.memory >= 1, "at least 1")
        self._require("num_tokens", self.num_tokens >= tokens, f"at least {tokens}")
        self._require("length", self.length >= least, f"at least {least}")
        self._require("longer", not (self.by_state and self.longer), "left out")
        self._require("longer", min(self.longer, default=least) >= least, f"at least {least}")
        longest = self.positions - 1
        fits = all(1 <= size <= longest for size in self.state_sizes)
        self._require("state_sizes", fits, f"at least 1 and at most {longest}")
        self.models()

    def _require(self, name: str, holds: bool, allowed: str):
        require(self, name, holds, f"{allowed} for {self.task}")

    @property
    def by_state(self) -> bool:
        """Whether the task compares state sizes, and not variants."""
        return self.task in BY_STATE

    @property
    def positions(self) -> int:
        """The length of a row."""
        return 2 * self.memory + 1 if self.task == "copying" else self.length

    def build(self, fields: dict) -> "TnnConfig":
        with importing():
            from modeling_tnn.configuration_tnn import TnnConfig
        shared = {
            "vocab_size": self.num_tokens,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": 1 if self.task == "delay" else self.num_hidden_layers,
            "gtu_expansion": 1,
            "max_position_embeddings": self.positions,
            "hidden_dropout_prob": 0.0,
        }
        return TnnConfig(**shared | fields)

    def state_config(self, states: int) -> "TnnConfig":
        """The configuration with this number of states."""
        names = ("rtf_initializer", "rtf_constraint")
        fields = {"tno_type": "rtf", "rtf_state_size": states, "s4d_state_size": states, "rtf_num_denominators": 1}
        fields |= {name: getattr(self, name) for name in names}
        return self.build(fields | parse_overrides(self.config_overrides))

    def models(self) -> "dict[int | str, TnnConfig]":
        """The configurations to compare, by state size or by name of the variant."""
        if self.by_state:
            return {size: self.state_config(size) for size in self.state_sizes}
        return {variant.partition(":")[0]: self.variant_config(variant) for variant in self.variants}


@report_errors
def main():
    start(SyntheticArguments, __doc__, "run_synthetic")


if __name__ == "__main__":
    main()
