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

from tnn_scripts.common.errors import importing, report_errors

from tnn_scripts.common.declared import start
from tnn_scripts.common.parser import option, parse_overrides
from tnn_scripts.common.task_arguments import ComparisonArguments

if TYPE_CHECKING:
    from modeling_tnn import TnnConfig

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
            if bool(getattr(self, name)) != needed:
                given = " ".join(map(str, getattr(self, name))) or "nothing"
                raise ValueError(f"--{name} must be {'given' if needed else 'left out'} for {self.task}, got {given}")
        (self._check_states if self.by_state else self._check_lengths)()
        self.models()

    @property
    def by_state(self) -> bool:
        """Whether the task compares state sizes, and not variants."""
        return self.task in BY_STATE

    def _check_states(self):
        longest = 2 * self.memory + 1 if self.task == "copying" else self.length
        if self.task == "delay" and self.memory >= self.length:
            raise ValueError(f"--memory must be below --length {self.length} for a delay, got {self.memory}")
        if min(self.state_sizes) < 1 or max(self.state_sizes) >= longest:
            sizes = " ".join(map(str, self.state_sizes))
            raise ValueError(f"--state_sizes must be at least 1 and below the length {longest}, got {sizes}")
        if self.longer:
            raise ValueError(f"--longer must be left out for {self.task}, got {' '.join(map(str, self.longer))}")

    def _check_lengths(self):
        tokens, least = (
            (2 * self.memory + 1, 3 * self.memory + 1) if self.task == "recall" else (3, 2 * self.memory + 2)
        )
        if self.memory < 1 or self.num_tokens < tokens:
            raise ValueError(
                f"--memory must be at least 1, and --num_tokens {tokens} for {self.task}, got {self.memory} and "
                f"{self.num_tokens}"
            )
        lengths = [self.length, *self.longer]
        if min(lengths) < least:
            given = " ".join(map(str, lengths))
            raise ValueError(f"--length and --longer must be at least {least} for {self.task}, got {given}")

    def build(self, fields: dict) -> "TnnConfig":
        with importing():
            from modeling_tnn import TnnConfig
        shared = {
            "vocab_size": self.num_tokens,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": 1 if self.task == "delay" else self.num_hidden_layers,
            "gtu_expansion": 1,
            "max_position_embeddings": 2 * self.memory + 1 if self.task == "copying" else self.length,
            "hidden_dropout_prob": 0.0,
        }
        return TnnConfig(**shared | fields)

    def state_config(self, states: int) -> "TnnConfig":
        """The configuration with so many states."""
        rtf = {
            "rtf_num_denominators": 1,
            "rtf_initializer": self.rtf_initializer,
            "rtf_constraint": self.rtf_constraint,
        }
        sizes = {"tno_type": "rtf", "rtf_state_size": states, "s4d_state_size": states}
        return self.build(sizes | rtf | parse_overrides(self.config_overrides))

    def models(self) -> "dict[int | str, TnnConfig]":
        """The configurations to compare, by state size or by name of the variant.

        Raises:
            ValueError: a field of a variant is unknown, or has a value outside its limits.
        """
        if self.by_state:
            return {size: self.state_config(size) for size in self.state_sizes}
        return {variant.partition(":")[0]: self.variant_config(variant) for variant in self.variants}


@report_errors
def main():
    start(SyntheticArguments, __doc__, "run_synthetic")


if __name__ == "__main__":
    main()
