"""Time and memory of a layer by its state size and length: a transfer function, S4D, S4, and an associative scan.

    rtf     y = k * v, the taps k of b(z)/a(z) by one transform, N coefficients for each channel (RTF paper, section 3)
    s4d     y = k * v, the taps k of a diagonal model with N / 2 pairs of poles by a Vandermonde product (S4D paper)
    s4      y = k * v, the taps k of a diagonal plus low-rank model by a Cauchy product, see `s4_layer.py` (S4 paper)
    scan    x_k = lambda x_{k-1} + B v_k,  y_k = Re C x_k, all x_k by a parallel scan (S5, Smith et al., 2023)

B batch, L length, D channels, N states. The first three never compute a state. The scan stores L N complex numbers,
and all its channels share them. Every repeat measures all sizes of all layers of a length once.
"""

import statistics
from functools import partial

import torch
from suites.memory import saved_bytes
from suites.s4_layer import S4Layer
from torch import nn

from modeling_tnn import TnnConfig
from modeling_tnn.tno_auto import build_tno
from tnn_programs.benchmarks.measure import measure, ratio
from tnn_programs.cli.tables import markdown_table


def scan(rates: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    """The states x_k = rates x_{k-1} + inputs_k with x_{-1} = 0, in O(log L) steps and O(L) work.

    Two neighbours form one step of a sequence of half the length, whose rates are squared (Blelloch, 1990).

    Args:
        rates: `(N,)`.
        inputs: `(B, L, N)`.

    Returns:
        `(B, L, N)`.
    """
    length = inputs.shape[1]
    if length == 1:
        return inputs
    even, odd = inputs[:, 0::2], inputs[:, 1::2]
    after_odd = scan(rates**2, odd + rates * even[:, : odd.shape[1]])  # (B, L // 2, N)
    after_even = torch.cat([even[:, :1], even[:, 1:] + rates * after_odd[:, : even.shape[1] - 1]], dim=1)
    states = torch.empty_like(inputs)
    states[:, 0::2], states[:, 1::2] = after_even, after_odd
    return states


class ScanLayer(nn.Module):
    """A diagonal state-space layer, computed by `scan`. All channels share its N states."""

    def __init__(self, channels: int, state_size: int):
        super().__init__()
        self.log_rate = nn.Parameter(torch.linspace(-6, -1, state_size))
        self.angle = nn.Parameter(torch.linspace(0, 3, state_size))
        self.input_map = nn.Parameter(torch.randn(channels, state_size, dtype=torch.complex64) / channels**0.5)
        self.output_map = nn.Parameter(torch.randn(state_size, channels, dtype=torch.complex64) / state_size**0.5)

    def forward(self, v: torch.Tensor) -> torch.Tensor:
        """`(B, L, D)` to `(B, L, D)`."""
        rates = torch.polar(torch.exp(-torch.exp(self.log_rate)), self.angle)  # (N,)
        states = scan(rates, v.to(self.input_map.dtype) @ self.input_map)  # (B, L, N)
        return (states @ self.output_map).real


def operator_layer(way: str, channels: int, state_size: int, length: int) -> nn.Module:
    config = TnnConfig(
        tno_type=way,
        hidden_size=channels,
        gtu_expansion=1,
        max_position_embeddings=length,
        rtf_state_size=state_size if way == "rtf" else 1,
        rtf_initializer="montel",
        s4d_state_size=state_size if way == "s4d" else 2,
    )
    operator = build_tno(config)
    with torch.no_grad():
        operator.reset_parameters()
    return operator


def run(args) -> list[dict]:
    """One row for each length, layer and state size: milliseconds of forward and backward, and saved MiB."""
    return [row for length in args.length for row in rows_of_length(args, length)]


def rows_of_length(args, length: int) -> list[dict]:
    """The rows of one length; transfer functions of fewer samples than states are left out."""
    torch.manual_seed(0)
    v = torch.randn(args.batch_size, length, args.hidden_size, device=args.device, requires_grad=True)
    gradient = torch.randn_like(v)
    sizes = [("rtf", size) for size in args.state_sizes if size < length]
    sizes += [("s4d", size) for size in args.state_sizes if size % 2 == 0]
    layers = {(way, size): operator_layer(way, args.hidden_size, size, length) for way, size in sizes}
    scanned = [size for size in args.state_sizes if size <= args.largest_scan]
    layers |= {("s4", size): S4Layer(args.hidden_size, size) for way, size in sizes if way == "s4d"}
    layers |= {("scan", size): ScanLayer(args.hidden_size, size) for size in scanned}
    layers = {key: layer.to(args.device) for key, layer in layers.items()}

    def passes(layer: nn.Module):
        layer(v).backward(gradient, inputs=[v, *layer.parameters()])

    ways = {key: partial(passes, layer) for key, layer in layers.items()}
    times = measure(ways, args)
    rows = []
    for (way, size), seconds in times.items():
        rows.append(
            {
                "way": way,
                "state_size": size,
                "length": length,
                "channels": args.hidden_size,
                "milliseconds": 1000 * statistics.median(seconds),
                "over_smallest": ratio(seconds, times[way, min(s for w, s in times if w == way)]),
                "over_rtf": ratio(seconds, times["rtf", size]) if ("rtf", size) in times else None,
                "saved_mebibytes": saved_bytes(partial(layers[way, size], v)) / 2**20,
                "parameters": sum(parameter.numel() for parameter in layers[way, size].parameters()),
            }
        )
    return rows


def table(rows: list[dict]) -> str:
    """The rows as a Markdown table."""
    smallest = min(row["state_size"] for row in rows)
    headers = ["layer", "state size", "length", "ms", f"over state size {smallest}", "over rtf"]
    figures = {"milliseconds": ".1f", "over_smallest": ".2f", "over_rtf": ".2f", "saved_mebibytes": ".1f"}

    def cells(row: dict) -> list[str]:
        return ["" if row[name] is None else format(row[name], form) for name, form in figures.items()]

    lines = ([row["way"], row["state_size"], row["length"], *cells(row)] for row in rows)
    return markdown_table([*headers, "kept for backward, MiB"], lines)
