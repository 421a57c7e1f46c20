"""The models of the released RTF code, written from their formulas, with random weights under the released names.

    filter   k = irfft( rfft(b) / rfft(a) + h_0 ) on F = T + T mod 2 points       golden vectors, sections 5.2, 5.4
    S4       x = x + W_glu( gelu(filter(norm(x))) ),  or norm(x + ..) after it
    Hyena    x = x + W_o gelu( W_r norm( p * (filter + h_0)(q * v) ) ),  then an MLP

Products are dense: a matrix for each channel. B batch, l length, d channels, T truncation length, N order.
"""

import numpy as np
import torch
from torch.nn.functional import conv1d, gelu, glu, linear


def normal(generator: torch.Generator, *shape: int, scale: float = 0.5) -> torch.Tensor:
    return scale * torch.randn(shape, generator=generator, dtype=torch.float64)


def impulse_response(ab: torch.Tensor, h_0: torch.Tensor, scalar: torch.Tensor | None, truncation: int) -> np.ndarray:
    """The taps of all filters, `(filters, T)`."""
    filters, size = len(h_0), truncation + truncation % 2
    a, b = ab[:-filters].numpy(), ab[-filters:].numpy()
    if scalar is not None:
        a = a / (np.abs(a).sum(1) + np.abs(scalar.numpy()) + 1e-6)[:, None]
    a = np.repeat(a, filters // len(a), axis=0)
    denominator = np.concatenate([np.ones((filters, 1)), a], axis=1)
    numerator = np.concatenate([np.zeros((filters, 1)), b], axis=1)
    response = np.fft.rfft(numerator, size) / np.fft.rfft(denominator, size) + h_0.numpy()[:, None]
    return np.fft.irfft(response, size)


def filtered(x: torch.Tensor, state: dict, prefix: str, truncation: int) -> torch.Tensor:
    """The filters over `x` `(B, l, d)`, of both sides if there are two for each channel."""
    taps = impulse_response(state[prefix + "ab"], state[prefix + "h_0"], state.get(prefix + "scalar"), truncation)
    width, length = x.shape[2], x.shape[1]
    matrix = np.zeros((width, length, length))
    for i in range(length):
        for j in range(length):
            if j <= i:
                matrix[:, i, j] = taps[:width, i - j]
            elif len(taps) > width:
                matrix[:, i, j] = taps[width:, j - i - 1]
    return torch.einsum("dij,bjd->bid", torch.from_numpy(matrix), x)


def rational_state(generator, prefix: str, width: int, order: int, num_a: int, sides: int, constraint: bool) -> dict:
    state = {
        prefix + "ab": normal(generator, sides * (num_a + width), order, scale=0.2),
        prefix + "h_0": normal(generator, sides * width),
    }
    return state | ({prefix + "scalar": torch.rand(num_a, generator=generator).double()} if constraint else {})


def affine(generator, name: str, rows: int, columns: int) -> dict:
    return {f"{name}.weight": normal(generator, rows, columns), f"{name}.bias": normal(generator, rows)}


def norm_state(generator, prefix: str, width: int, batch: bool = False) -> dict:
    state = {f"{prefix}.weight": 1 + normal(generator, width), f"{prefix}.bias": normal(generator, width)}
    if batch:
        variance = 0.5 + torch.rand(width, generator=generator).double()
        state |= {f"{prefix}.running_mean": normal(generator, width), f"{prefix}.running_var": variance}
        state[f"{prefix}.num_batches_tracked"] = torch.tensor(7)
    return state


def normalized(x: torch.Tensor, state: dict, prefix: str) -> torch.Tensor:
    if f"{prefix}.running_mean" in state:
        mean, variance = state[f"{prefix}.running_mean"], state[f"{prefix}.running_var"]
    else:
        mean, variance = x.mean(-1, keepdim=True), x.var(-1, unbiased=False, keepdim=True)
    return (x - mean) / (variance + 1e-5).sqrt() * state[f"{prefix}.weight"] + state[f"{prefix}.bias"]


def affine_of(x: torch.Tensor, state: dict, name: str) -> torch.Tensor:
    return linear(x, state[f"{name}.weight"], state[f"{name}.bias"])


def s4_state(
    encoder: dict, head: dict, prenorm=True, batch=True, sides=2, num_a=1, width=6, order=3, layers=2
) -> dict:
    """A state dict of the Long Range Arena models. `encoder` and `head` are those of the task."""
    generator = torch.Generator().manual_seed(3)
    state = {**encoder, **head}
    for layer in range(layers):
        stem = f"model.layers.{layer}."
        state |= rational_state(generator, stem + "layer.layer.", width, order, num_a, sides, constraint=False)
        state |= affine(generator, stem + "layer.output_linear.0", 2 * width, width)
        state |= norm_state(generator, stem + "norm.norm", width, batch)
    return state | (norm_state(generator, "model.norm.norm", width, batch) if prenorm else {})


def s4_features(x: torch.Tensor, state: dict, truncation: int, lengths: list[int] | None = None) -> torch.Tensor:
    """The hidden states after the stack, for encoded inputs `(B, l, d)` with texts of these `lengths`."""
    real = torch.ones(x.shape[:2], dtype=torch.bool)
    for row, length in enumerate(lengths or []):
        real[row, length:] = False
    prenorm = "model.norm.norm.weight" in state
    for layer in range(len({name.split(".")[2] for name in state if name.startswith("model.layers.")})):
        stem = f"model.layers.{layer}."
        y = normalized(x, state, stem + "norm.norm") if prenorm else x
        y = filtered(y * real[..., None], state, stem + "layer.layer.", truncation)
        x = x + glu(affine_of(gelu(y), state, stem + "layer.output_linear.0"))
        x = x if prenorm else normalized(x, state, stem + "norm.norm")
    return normalized(x, state, "model.norm.norm") if prenorm else x


def pooled(x: torch.Tensor, lengths: list[int] | None = None) -> torch.Tensor:
    """The mean over the tokens of each text, `(B, l, d)` to `(B, d)`."""
    return torch.stack([row[: lengths[i] if lengths else None].mean(0) for i, row in enumerate(x)])


def hyena_state(low_rank: int | None = 4, constraint=True, num_a=6, width=6, order=3, taps=3, layers=2) -> dict:
    """A state dict of the language model, as Lightning saves it."""
    generator = torch.Generator().manual_seed(4)
    embedding = normal(generator, 19, width)
    state = {"model.backbone.embeddings.word_embeddings.weight": embedding, "model.lm_head.weight": embedding}
    for layer in range(layers):
        stem = f"model.backbone.layers.{layer}."
        state |= norm_state(generator, stem + "norm1", width) | norm_state(generator, stem + "norm2", width)
        state |= affine(generator, stem + "mixer.in_proj", 3 * width, width)
        state[stem + "mixer.short_filter.weight"] = normal(generator, 3 * width, 1, taps)
        state[stem + "mixer.short_filter.bias"] = normal(generator, 3 * width)
        state |= rational_state(generator, stem + "mixer.filter_fn.", width, order, num_a, 1, constraint)
        if low_rank is not None:
            state[stem + "mixer.norm.weight"] = 1 + normal(generator, width)
            state |= affine(generator, stem + "mixer.mimo_proj", low_rank, width)
        state |= affine(generator, stem + "mixer.out_proj", width, low_rank or width)
        state |= affine(generator, stem + "mlp.fc1", 10, width) | affine(generator, stem + "mlp.fc2", width, 10)
    return state | norm_state(generator, "model.backbone.ln_f", width)


def hyena_operator(x: torch.Tensor, state: dict, stem: str, truncation: int) -> torch.Tensor:
    """The mixer of the language model, `(B, l, d)` to `(B, l, d)`."""
    width, length = x.shape[2], x.shape[1]
    kernel, bias = state[stem + "short_filter.weight"], state[stem + "short_filter.bias"]
    projected = affine_of(x, state, stem + "in_proj").mT  # (B, 3d, l)
    short = conv1d(projected, kernel, bias, padding=kernel.shape[-1] - 1, groups=3 * width)[..., :length].mT
    p, q, v = short.split(width, dim=-1)
    y = p * (filtered(q * v, state, stem + "filter_fn.", truncation) + state[stem + "filter_fn.h_0"] * (q * v))
    if stem + "mimo_proj.weight" in state:
        y = y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt() * state[stem + "norm.weight"]
        y = gelu(affine_of(y, state, stem + "mimo_proj"))
    return affine_of(y, state, stem + "out_proj")


def hyena_logits(ids: torch.Tensor, state: dict, truncation: int) -> torch.Tensor:
    """The logits of the language model, `(B, l)` to `(B, l, vocabulary)`."""
    embedding = state["model.backbone.embeddings.word_embeddings.weight"]
    x = embedding[ids]
    for layer in range(len({name.split(".")[3] for name in state if name.startswith("model.backbone.layers.")})):
        stem = f"model.backbone.layers.{layer}."
        x = x + hyena_operator(normalized(x, state, stem + "norm1"), state, stem + "mixer.", truncation)
        hidden = affine_of(normalized(x, state, stem + "norm2"), state, stem + "mlp.fc1")
        x = x + affine_of(gelu(hidden, approximate="tanh"), state, stem + "mlp.fc2")
    return linear(normalized(x, state, "model.backbone.ln_f"), embedding)
