"""The cost of a forward and backward pass of one operator with its coefficients, by length of the sequence.

Every variant gets its input in the memory layout of its model: the released form token by token, ours channel by
channel. The released form is written anew here: the position encoder at every lag, and three real transforms of twice
the length along the second-last axis, with every intermediate result saved for the backward pass.
"""

from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from suites.device import peak_on_device

from modeling_tnn.configuration_tnn import TnnConfig
from modeling_tnn.tno import ToeplitzOperator
from modeling_tnn.tno_auto import build_tno
from tnn_programs.benchmarks.measure import markdown, measure, ratio

FORMATS = {"length": "", "way": "", "milliseconds": ".0f", "released_over_this": ".2f", "rpe_over_this": ".2f"}
FORMATS |= {"tokens_per_second": ".0f", "peak_mebibytes": ".0f"}


def rows_of(times: dict[str, list[float]], tokens: int, bases: tuple[str, ...], **fields) -> list[dict]:
    """One row for each variant: milliseconds, tokens per second, and the speedup over each base."""
    return [
        fields
        | {"way": name, "milliseconds": 1000 * median(seconds)}
        | {"tokens_per_second": tokens / median(seconds)}
        | {f"{base}_over_this": ratio(times[base], seconds) for base in bases if base in times}
        for name, seconds in times.items()
    ]


def operator_sizes(length: int) -> dict[str, int]:
    """The sizes of the papers."""
    return {"ski_rank": min(64, length), "ski_filter_size": 32}


def released_product(operator: ToeplitzOperator, v: torch.Tensor) -> torch.Tensor:
    """The Toeplitz product as the released code computes it, `(B, L, D)` to `(B, L, D)`."""
    length = v.shape[1]
    coefficients = operator.coefficients(length).t()  # (L, D) or (2L-1, D)
    zero = coefficients[:1] if operator.causal else coefficients[length - 1 : length]
    positive = coefficients[-length:]
    parts = [positive, zero] if operator.causal else [positive, zero, coefficients[: length - 1]]
    kernel = torch.fft.rfft(torch.cat(parts), n=2 * length, dim=-2)
    spectrum = torch.fft.rfft(v.to(coefficients.dtype), n=2 * length, dim=-2)
    return torch.fft.irfft(spectrum * kernel, n=2 * length, dim=-2)[:, :length].to(v.dtype)


def build_operator(tno_type: str, args, length: int, **fields) -> ToeplitzOperator:
    """An operator with the sizes of the papers, and as many taps as the sequence has tokens unless `fields` say."""
    config = TnnConfig(
        tno_type=tno_type,
        causal=not args.bidirectional,
        hidden_size=args.hidden_size,
        decay=args.decay,
        max_position_embeddings=length,
        rtf_state_size=min(args.state_size, length - 1),
        **operator_sizes(length),
        **fields,
    )
    torch.manual_seed(0)
    operator = build_tno(config).to(args.device)
    for parameter in operator.parameters():
        torch.nn.init.uniform_(parameter, -0.01, 0.01)
    return operator


def passes(way: str, args, batch_size: int, length: int) -> Callable[[], None]:
    tno_type = "rpe" if way == "released" else way.split()[0]
    grid = {"fd_resolution": 2 << (length - 1).bit_length()} if way.endswith("twice") else {}
    operator = build_operator(tno_type, args, length, **grid)
    operator.implementation = "eager" if way.endswith("eager") else "fused"
    shape = (operator.channels, batch_size, length)
    v, gradient = (torch.randn(shape, device=args.device).permute(1, 2, 0) for _ in range(2))
    if way == "released":
        v, gradient = v.contiguous(), gradient.contiguous()
    v.requires_grad_()
    run = released_product if way == "released" else type(operator).__call__
    return lambda: run(operator, v).backward(gradient)


def run(args) -> list[dict]:
    """One row for each length and variant. A batch has `tokens` tokens."""
    rows = []
    for length in args.lengths:
        batch_size = max(1, args.tokens // length)
        ways = {way: passes(way, args, batch_size, length) for way in args.ways}
        found = rows_of(measure(ways, args), batch_size * length, ("released", "rpe"), length=length)
        rows += [row | peak_on_device(ways[row["way"]], args) for row in found]
    return rows


table = partial(markdown, formats=FORMATS)
