"""The options of `run_synthetic.py`, and the models that they describe."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tnn_scripts.common.errors import importing

from tnn_scripts.common.arguments import parse_overrides
from tnn_scripts.common.training_arguments import GroupArguments

if TYPE_CHECKING:
    from modeling_tnn import TnnConfig


def check_state(args: "SyntheticArguments"):
    longest = 2 * args.memory + 1 if args.task == "copying" else args.length
    if args.task == "delay" and args.memory >= args.length:
        raise ValueError(f"--memory must be below --length {args.length} for a delay, got {args.memory}")
    if args.state_sizes and (min(args.state_sizes) < 1 or max(args.state_sizes) >= longest):
        sizes = " ".join(map(str, args.state_sizes))
        raise ValueError(f"--state_sizes must be at least 1 and below the length {longest}, got {sizes}")


def check_recall(args: "SyntheticArguments"):
    if not 1 <= args.memory <= (args.num_tokens - 1) // 2:
        raise ValueError(f"--num_tokens must be at least 2 --memory + 1 for recall, got {args.num_tokens}")
    check_lengths(args, 3 * args.memory + 1)


def check_passkey(args: "SyntheticArguments"):
    if args.num_tokens < 3 or args.memory < 1:
        raise ValueError(f"--num_tokens must be at least 3, got {args.num_tokens}, and --memory 1, got {args.memory}")
    check_lengths(args, 2 * args.memory + 2)


def check_lengths(args: "SyntheticArguments", least: int):
    lengths = [args.length, *args.longer]
    if min(lengths) < least:
        given = " ".join(map(str, lengths))
        raise ValueError(f"--length and --longer must be at least {least} for {args.task}, got {given}")


def build(fields: dict) -> "TnnConfig":
    with importing():
        from modeling_tnn import TnnConfig
    return TnnConfig(**fields)


def state_config(args: "SyntheticArguments", state_size: int) -> "TnnConfig":
    copying = args.task == "copying"
    fields = {
        "tno_type": "rtf",
        "vocab_size": args.num_tokens,
        "hidden_size": args.hidden_size,
        "num_hidden_layers": args.num_hidden_layers if copying else 1,
        "gtu_expansion": 1,
        "max_position_embeddings": 2 * args.memory + 1 if copying else args.length,
        "rtf_state_size": state_size,
        "s4d_state_size": state_size,
        "rtf_num_denominators": 1,
        "rtf_initializer": args.rtf_initializer,
        "rtf_constraint": args.rtf_constraint,
        "hidden_dropout_prob": 0.0,
    }
    return build(fields | parse_overrides(args.config_overrides))


def variant_config(args: "SyntheticArguments", variant: str) -> "TnnConfig":
    """The configuration of a variant `name:field=value,field=value`.

    Raises:
        ValueError: a field is unknown, or has a value outside its limits.
    """
    name, _, changes = variant.partition(":")
    if "=" in name:
        raise ValueError(f"--variants must be NAME or NAME:FIELD=VALUE,..., got {variant}")
    fields = {
        "vocab_size": args.num_tokens,
        "hidden_size": args.hidden_size,
        "num_hidden_layers": args.num_hidden_layers,
        "gtu_expansion": 1,
        "max_position_embeddings": args.length,
        "hidden_dropout_prob": 0.0,
    }
    try:
        return build(fields | parse_overrides(args.config_overrides) | parse_overrides(changes, option="changes"))
    except ValueError as error:
        raise ValueError(f"--variants {name}: {error}") from error


# Raise a ValueError for arguments that contradict each other.
CHECKS = {"copying": check_state, "delay": check_state, "recall": check_recall, "passkey": check_passkey}


@dataclass(kw_only=True)
class SyntheticArguments(GroupArguments):
    """The task and the models."""

    task: str = field(metadata={"choices": tuple(CHECKS)})
    state_sizes: list[int] = field(
        default_factory=list, metadata={"help": "Numbers of states to compare, of rtf or s4d: copying and delay."}
    )
    variants: list[str] = field(default_factory=list)
    config_overrides: str | None = None
    memory: int = field(
        default=1024, metadata={"help": "Tokens to copy, steps of delay, pairs to recall, or tokens of a passkey."}
    )
    num_tokens: int = field(default=64, metadata={"help": "Size of the vocabulary, markers included."})
    length: int = 4000
    longer: list[int] = field(default_factory=list)
    hidden_size: int = field(default=64, metadata={"help": "Width of the model; for delay the number of channels."})
    num_hidden_layers: int = field(default=4, metadata={"help": "Layers of the model; delay has one."})
    rtf_initializer: str = field(default="montel", metadata={"help": "Initial coefficients: zeros, xavier or montel."})
    rtf_constraint: str | None = field(default=None, metadata={"help": "l1_montel keeps poles in the unit circle."})
    seeds: list[int] | None = None
    max_train_samples: int = 10_000
    max_eval_samples: int = 1_000
    dry_run: bool = False

    def __post_init__(self):
        super().__post_init__()
        CHECKS[self.task](self)
        for name, needed in (("state_sizes", self.by_state), ("variants", not self.by_state)):
            if bool(getattr(self, name)) != needed:
                given = " ".join(map(str, getattr(self, name))) or "nothing"
                raise ValueError(f"--{name} must be {'given' if needed else 'left out'} for {self.task}, got {given}")
        if self.by_state and self.longer:
            raise ValueError(f"--longer must be left out for {self.task}, got {' '.join(map(str, self.longer))}")
        self.models()

    @property
    def by_state(self) -> bool:
        """Whether the task compares state sizes, and not variants."""
        return self.task in ("copying", "delay")

    def models(self) -> "dict[int | str, TnnConfig]":
        """The configurations to compare, by state size or by name of the variant.

        Raises:
            ValueError: a field of a variant is unknown, or has a value outside its limits.
        """
        if self.state_sizes:
            return {size: state_config(self, size) for size in self.state_sizes}
        names = [variant.partition(":")[0] for variant in self.variants]
        if len(set(names)) != len(names):
            raise ValueError(f"--variants must have different names, got {', '.join(names)}")
        return dict(zip(names, (variant_config(self, variant) for variant in self.variants), strict=True))
