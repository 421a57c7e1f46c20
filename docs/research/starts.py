"""Train the small model of an ablation from other first kernels: which start lets it learn soon?

A start is a change of the model before the training. Most set the taps of `explicit`, which can have any kernel, or
the encoder of `rpe`; some give the operator a rate of its own. Kernels have a norm of 1 over the lags, unless named
otherwise. The program writes the validation perplexity and, of the kernels before and after the training, the
effective rank and the horizon, as means over the layers:

    effective rank = exp(-sum_i p_i ln p_i),    p_i = s_i^2 / sum_j s_j^2,    s the singular values of (t_c / |t_c|)_c

D channels, P lags, t_c the kernel of channel c; a bidirectional one has 2P - 1. The horizon is the median over the
channels of the lags that hold 90% of a kernel.

`--family` chooses the starts: kernels for the recipe `ablations/start`, ski for `ablations/ski`, fd for
`ablations/fd`.

Example:
    python docs/research/starts.py --recipe ablations/start --dataset_name Salesforce/wikitext \\
        --dataset_config_name wikitext-2-v1 --bf16 true --use_cpu true --seeds 0 1 --output_dir outputs/starts
    python docs/research/starts.py --family ski --recipe ablations/ski --dataset_name Salesforce/wikitext \\
        --dataset_config_name wikitext-2-v1 --bf16 true --use_cpu true --learning_rate 8e-3 --output_dir outputs/ski
"""

import dataclasses
import itertools
import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

from tnn_programs.cli.errors import report_errors

import numpy as np
import torch
from scipy.stats import entropy
from transformers import PreTrainedModel, TrainingArguments

from modeling_tnn.tno import ToeplitzOperator
from tnn_programs.cli.declared import trainer_arguments, training_options
from tnn_programs.cli.parser import parse_arguments
from tnn_programs.cli.tables import markdown_table
from tnn_programs.plotting.reading import Kernel
from tnn_programs.run_ablation import AblationArguments
from tnn_programs.training.comparing import Runs, comparison
from tnn_programs.training.grouping_trainer import GroupingTrainer
from tnn_programs.training.run_ablation import TextTask

Maker = Callable[[int, int], torch.Tensor]
NOT_TRAINED = (r"\.tno\.", 0)
LEARNED = "decay=1.0e-6,learnable_decay=true"
EXPLICIT, RTF = "tno_type=explicit", "tno_type=rtf,rtf_state_size=16,rtf_initializer=xavier"


@dataclass(frozen=True)
class Start:
    """A model before its training.

    Attributes:
        fields: changes of the configuration, as in `--config_overrides`.
        change: what is done to the model.
        rate: a pattern of parameter names, and their learning rate over that of the rest.
    """

    fields: str = ""
    change: Callable[[PreTrainedModel], None] = lambda model: None
    rate: tuple[str, float] | None = None

    def groups(self, learning_rate: float) -> list[str]:
        """As in `--parameter_groups`."""
        return [] if self.rate is None else [f"{self.rate[0]}:learning_rate={self.rate[1] * learning_rate:g}"]


def operators(model: PreTrainedModel) -> list[ToeplitzOperator]:
    return [module for module in model.modules() if isinstance(module, ToeplitzOperator)]


def unit(kernels: torch.Tensor) -> torch.Tensor:
    """Kernels `(D, P)` with a norm of 1."""
    return kernels / kernels.norm(dim=1, keepdim=True)


def identity(channels: int, length: int) -> torch.Tensor:
    """The kernel that leaves a text as it is, `(D, P)`."""
    return torch.eye(1, length).expand(channels, length)


def noise(channels: int, length: int, lags: int | None = None) -> torch.Tensor:
    """Random taps on the first `lags`, or on all, `(D, P)`."""
    return unit(torch.randn(channels, length) * (torch.arange(length) < (lags or length)))


def constant(channels: int, length: int) -> torch.Tensor:
    """The same tap at all lags, of either sign, `(D, P)`."""
    return unit(torch.randn(channels, 1).sign().expand(channels, length))


def one_lag(channels: int, length: int, longest: int = 16) -> torch.Tensor:
    """One lag below `longest` in each channel, `(D, P)`."""
    return torch.eye(length)[torch.randint(longest, (channels,))]


def exponentials(channels: int, length: int, longest: int = 128, oscillating: bool = False) -> torch.Tensor:
    """Decaying exponentials with time scales of 1 to `longest` lags, `(D, P)`; times cosines of any frequency."""
    lags = torch.arange(length)
    scales, angles = longest ** torch.rand(channels, 1), math.pi * torch.rand(channels, 1)
    phases = angles * lags + 2 * math.pi * torch.rand(channels, 1) if oscillating else torch.zeros(channels, 1)
    return unit(torch.exp(-lags / scales) * phases.cos())


def oscillations(longest: int) -> Maker:
    return lambda channels, length: exponentials(channels, length, longest, oscillating=True)


def both(first: Maker, second: Maker, share: float) -> Maker:
    """The first kernels, and a share of the second."""
    return lambda *size: first(*size) + share * second(*size)


LOCAL = both(identity, oscillations(16), 0.3)


def with_taps(make: Maker) -> Callable[[PreTrainedModel], None]:
    """The change of `explicit` that gives it these kernels."""

    def change(model: PreTrainedModel):
        for operator in operators(model):
            kernels = make(*operator.taps.shape)
            operator.taps.copy_(kernels / operator.decay ** torch.arange(kernels.shape[1]))

    return change


def hats(width: int, length: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Features of a lag k: triangles on a logarithmic scale, divided by 1 + k."""

    def features(lags: torch.Tensor) -> torch.Tensor:
        peaks = torch.linspace(0, math.log(length), width, dtype=lags.dtype)  # (w,)
        place = torch.log1p(lags)[:, None]  # (M, 1)
        return (1 - (place - peaks).abs() / peaks[1]).clamp(min=0) / (1 + lags[:, None])  # (M, w)

    return features


def fitted(make: Maker, with_hats: bool = False) -> Callable[[PreTrainedModel], None]:
    """The change of `rpe` that fits the last map of its encoder to these kernels, by least squares.

    Without a limit of the condition, its weights would be 70,000 for the MLP of the papers.
    """

    def change(model: PreTrainedModel):
        length = model.config.max_position_embeddings
        for operator in operators(model):
            if with_hats:
                operator.rpe.features = hats(operator.rpe.out.linear.weight.shape[1], length)
            lags = torch.arange(length, dtype=operator.rpe.dtype)
            kernels = make(operator.channels, length).to(lags.dtype)  # (D, P)
            features = torch.cat([operator.rpe.features(lags), torch.ones_like(lags)[:, None]], dim=1)  # (P, w+1)
            weights = operator.decay ** lags[:, None]
            parts = ((weights * features).double(), kernels.t().double())
            found = torch.linalg.lstsq(*parts, rcond=1e-3, driver="gelsd").solution  # (w+1, D)
            operator.rpe.out.linear.weight.copy_(found[:-1].t())
            operator.rpe.out.linear.bias.copy_(found[-1])

    return change


def spread(longest: float) -> Callable[[PreTrainedModel], None]:
    """The change of learned decays to time constants of 0.1 to `longest` lags, evenly on a logarithmic scale."""

    def change(model: PreTrainedModel):
        length = model.config.max_position_embeddings
        for operator in operators(model):
            constants = torch.logspace(-1, math.log10(longest), operator.channels, dtype=torch.float64)
            shares = (torch.exp(-1 / constants) - operator.decay) / (1 - operator.decay)
            operator.decay_logit.copy_(shares.clamp(min=1e-6).logit())
            norms = operator.coefficients(length).norm(dim=1)  # (D,)
            operator.rpe.out.linear.weight.div_(norms[:, None])
            operator.rpe.out.linear.bias.div_(norms)

    return change


def scaled(part: str, factor: float) -> Callable[[PreTrainedModel], None]:
    """The change that multiplies a part of the encoder, `out.linear` or `in_proj`."""

    def change(model: PreTrainedModel):
        for operator in operators(model):
            for parameter in operator.rpe.get_submodule(part).parameters():
                parameter.mul_(factor)

    return change


def add_identity(model: PreTrainedModel):
    """Add 1 to the response of `fd` at each frequency."""
    for operator in operators(model):
        operator.rpe.out.linear.bias.add_(1)


def scaled_ski(values: float, taps: float, identity: bool = False) -> Callable[[PreTrainedModel], None]:
    """The change of `ski` that multiplies the values of the low-rank part and the taps of the filter."""

    def change(model: PreTrainedModel):
        for operator in operators(model):
            operator.alphas.mul_(values)
            operator.betas.mul_(values)
            operator.filter.mul_(taps)
            if identity:
                operator.filter[:, operator.filter.shape[1] // 2] += 1

    return change


def scale_logits(model: PreTrainedModel):
    factor = 3 / math.sqrt(model.config.hidden_size)
    model.model.norm.register_forward_hook(lambda module, inputs, output: output * factor)


KERNELS = {
    "`rpe`, the papers' start": Start(),
    "the same, logits times 3/sqrt(d)": Start(change=scale_logits),
    "the same, kernels times 0.1": Start(change=scaled("out.linear", 0.1)),
    "the same, encoder at 5 times the rate": Start(rate=(r"\.tno\.rpe\.", 5)),
    'the same, `rpe_input="sinusoidal"`': Start("rpe_input=sinusoidal"),
    "`rpe`, decay 0.9": Start("decay=0.9"),
    "`rpe`, learned decays from 0.01": Start("decay=0.01,learnable_decay=true"),
    "`rpe`, learned decays of 0.1 to 16 lags": Start(LEARNED, spread(16)),
    "`rpe`, learned decays of 0.1 to 100 lags": Start(LEARNED, spread(100)),
    "`rpe`, fitted to the identity and 0.3 of oscillations to 16": Start(change=fitted(LOCAL)),
    'fitted to these, `rpe_input="sinusoidal"`': Start("rpe_input=sinusoidal", fitted(LOCAL)),
    "fitted to these, hat functions in place of the MLP": Start(change=fitted(LOCAL, with_hats=True)),
    "free: its usual start, noise on all lags": Start(EXPLICIT),
    "free: noise of norm 1 on the first 8 lags": Start(EXPLICIT, with_taps(lambda *size: noise(*size, lags=8))),
    "free: all lags of a channel equal": Start(EXPLICIT, with_taps(constant)),
    "free: the identity, not trained": Start(EXPLICIT, with_taps(identity), NOT_TRAINED),
    "free: the identity": Start(EXPLICIT, with_taps(identity)),
    "free: the identity and 0.5 of noise": Start(EXPLICIT, with_taps(both(identity, noise, 0.5))),
    "free: one lag for each channel, below 16": Start(EXPLICIT, with_taps(one_lag)),
    "free: exponentials, time scales to 128": Start(EXPLICIT, with_taps(exponentials)),
    "free: oscillations that decay, to 128, not trained": Start(EXPLICIT, with_taps(oscillations(128)), NOT_TRAINED),
    "free: oscillations that decay, to 128": Start(EXPLICIT, with_taps(oscillations(128))),
    "free: oscillations that decay, to 16": Start(EXPLICIT, with_taps(oscillations(16))),
    "free: the identity and 0.3 of these": Start(EXPLICIT, with_taps(LOCAL)),
    "`fd`": Start("tno_type=fd"),
    "`rtf`, 16 states, Xavier": Start(RTF),
    "the same, not trained": Start(RTF, rate=NOT_TRAINED),
    "the same, denominators not trained": Start(RTF, rate=(r"\.denominator$", 0)),
}
OF_SKI = {
    "values x 0.1": scaled_ski(0.1, 1),
    "values 0": scaled_ski(0, 1),
    "values x 0.1, taps x 0.3": scaled_ski(0.1, 0.3),
    "values x 0.1, the identity and taps x 0.1": scaled_ski(0.1, 0.1, identity=True),
    "values x 0.01, taps x 0.24": scaled_ski(0.01, 0.24),
    "values 0, taps x 0.12": scaled_ski(0, 0.12),
    "values 0, taps x 0.06": scaled_ski(0, 0.06),
    "all 0": scaled_ski(0, 0),
    "the identity alone": scaled_ski(0, 0, identity=True),
}
SKI = {name: Start("ski_rank=32", change) for name, change in OF_SKI.items()}
FD = {
    "output x 0.3": Start(change=scaled("out.linear", 0.3)),
    "output x 3": Start(change=scaled("out.linear", 3)),
    "frequencies x 4": Start(change=scaled("in_proj", 4)),
    "frequencies x 16": Start(change=scaled("in_proj", 16)),
    "plus the identity": Start(change=add_identity),
}
FAMILIES = {"kernels": KERNELS, "ski": SKI, "fd": FD}


@dataclass(kw_only=True)
class StartArguments(AblationArguments):
    """The starts, and the settings of the ablation."""

    family: str = field(default="kernels", metadata={"choices": tuple(FAMILIES), "help": "Starts of one operator."})
    starts: list[int] | None = field(default=None, metadata={"help": "Numbers of some of the starts, from 0."})

    def __post_init__(self):
        super().__post_init__()
        count = len(FAMILIES[self.family])
        if self.starts and not 0 <= min(self.starts) <= max(self.starts) < count:
            listed = " ".join(map(str, self.starts))
            raise ValueError(f"--starts must be from 0 to {count - 1} with --family {self.family}, got {listed}")


@torch.no_grad()
def kernels_of(model: PreTrainedModel) -> list[np.ndarray]:
    """The kernels of each layer, `(D, P)` or `(D, 2P-1)`."""
    length = model.config.max_position_embeddings
    return [operator.coefficients(length).double().numpy() for operator in operators(model)]


def effective_rank(kernels: np.ndarray) -> float:
    """That of kernels `(D, M)`, each with a norm of 1."""
    norms = np.linalg.norm(kernels, axis=1, keepdims=True)
    return float(np.exp(entropy(np.linalg.svd(kernels / norms.clip(1e-30), compute_uv=False) ** 2)))


def horizon(kernels: np.ndarray) -> float:
    """The median horizon of kernels `(D, P)` or `(D, 2P-1)`, in lags."""
    count = kernels.shape[1]
    first = -(count // 2) if count % 2 else 0  # P is even in the recipes
    return Kernel("", kernels, np.arange(first, first + count)).horizon_percentile(50)[0]


def with_start(args: StartArguments, number: int, rate: float) -> StartArguments:
    """The arguments with the start as the only variant, and its rates beside those of the command line."""
    start = list(FAMILIES[args.family].values())[number]
    variant = f"start {number}" + (f":{start.fields}" if start.fields else "")
    return dataclasses.replace(
        args, variants=[variant], parameter_groups=[*start.groups(rate), *args.parameter_groups]
    )


class Starts(TextTask):
    """Training from a start; the perplexity, and the figures of the kernels."""

    def trainer(self, training: TrainingArguments, number: int, rate: float) -> GroupingTrainer:
        all_starts, self.args = self.args, with_start(self.args, number, rate)
        trainer = super().trainer(training, self.args.variants[0], rate)
        self.args = all_starts
        with torch.no_grad(), torch.random.fork_rng():
            torch.manual_seed(training.seed)
            list(FAMILIES[self.args.family].values())[number].change(trainer.model.cpu())
        self.before = kernels_of(trainer.model)
        trainer.model.to(trainer.args.device)
        return trainer

    def row(self, trainer: GroupingTrainer, result, number: int, rate: float) -> dict:
        after = kernels_of(trainer.model.cpu())
        return {
            "kernels": list(FAMILIES[self.args.family])[number],
            "learning_rate": rate,
            "seed": trainer.args.seed,
            "norm": float(np.mean([np.linalg.norm(kernels, axis=1).mean() for kernels in self.before])),
            "rank": statistics.mean(map(effective_rank, self.before)),
            "end": statistics.mean(map(effective_rank, after)),
            "horizon": statistics.mean(map(horizon, after)),
            "perplexity": self.score(trainer, self.lengths[0]),
        }


def compare_starts(args: StartArguments, training: TrainingArguments):
    """Train from each start, at each rate and with each seed."""
    runs, task = Runs(args, training), Starts(args, training)
    numbers = range(len(FAMILIES[args.family])) if args.starts is None else args.starts
    chosen = itertools.product(numbers, task.rates)
    rows = [runs.train(task, one, seed) for one in chosen for seed in args.seeds]
    sys.stdout.write(f"{markdown_table(rows[0], map(dict.values, rows))}\nsaved in {runs.output}\n")


@report_errors
def main():
    args, options = parse_arguments([StartArguments, training_options()], __doc__)
    training = trainer_arguments(options)
    with comparison(args, training):
        compare_starts(args, training)


if __name__ == "__main__":
    main()
