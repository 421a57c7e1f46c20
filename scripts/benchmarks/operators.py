"""The cost of a forward and backward pass of one operator with its coefficients, by length of the sequence.

Every variant gets its input in the memory layout of its model: the released form token by token, ours channel by
channel.
"""

from collections.abc import Callable

import torch

from modeling_tnn import TnnConfig
from modeling_tnn.tno import ToeplitzOperator
from modeling_tnn.tno_auto import build_tno
from tnn_scripts.benchmarks.measure import markdown, measure, peak_on_device, rows_of
from tnn_scripts.benchmarks.peers import operator_sizes, released_product

FORMATS = {"length": "", "way": "", "milliseconds": ".0f", "released_over_this": ".2f", "rpe_over_this": ".2f"}
FORMATS |= {"tokens_per_second": ".0f", "peak_mebibytes": ".0f"}


def build_operator(tno_type: str, args, length: int) -> ToeplitzOperator:
    """An operator with the sizes of the papers, and as many taps as the sequence has tokens."""
    config = TnnConfig(
        tno_type=tno_type,
        causal=not args.bidirectional,
        hidden_size=args.hidden_size,
        decay=args.decay,
        max_position_embeddings=length,
        rtf_state_size=min(args.state_size, length - 1),
        **operator_sizes(length),
    )
    torch.manual_seed(0)
    operator = build_tno(config).to(args.device)
    for parameter in operator.parameters():
        torch.nn.init.uniform_(parameter, -0.01, 0.01)
    return operator


def passes(way: str, args, batch_size: int, length: int) -> Callable[[], None]:
    tno_type = "rpe" if way == "released" else way.split()[0]
    operator = build_operator(tno_type, args, length)
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


def table(rows: list[dict]) -> str:
    """The rows as a Markdown table."""
    return markdown(rows, FORMATS)
