"""Two tasks that measure what a layer can remember (RTF paper, table 2 and appendix C.3).

    Copying   t_1 .. t_M, then markers: after each marker but the last, the next of the M tokens
    Delay     a band-limited random signal: the same signal, `lag` steps later

M tokens to remember, B batch, L length. Both follow from a seed and are endless.
"""

import torch
from torch.utils.data import Dataset

# Fraction of the frequencies that a signal has; the others are zero.
BAND = 0.5
IGNORED = -100


class Copying(Dataset):
    """The rows of Copying for a causal language model, whose loss shifts the labels.

    Args:
        rows: number of rows.
        seed: seed of the rows.
        memory: number of tokens M.
        num_tokens: size of the vocabulary; the last token is the marker.
    """

    def __init__(self, rows: int, seed: int, memory: int, num_tokens: int):
        self.rows, self.seed, self.memory, self.num_tokens = rows, seed, memory, num_tokens

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < self.rows:
            raise IndexError(index)
        generator = torch.Generator().manual_seed(self.seed * 10**9 + index)
        marker = self.num_tokens - 1
        tokens = torch.randint(marker, (self.memory,), generator=generator)  # (M,)
        input_ids = torch.cat([tokens, torch.full((self.memory + 1,), marker)])  # (2M + 1,)
        labels = torch.cat([torch.full((self.memory + 1,), IGNORED), tokens])  # (2M + 1,)
        return {"input_ids": input_ids, "labels": labels}


class Delay(Dataset):
    """The signals of Delay, of unit power.

    Args:
        rows, seed: as for `Copying`.
        length: length L.
        lag: number of steps between the signal and the target.
    """

    def __init__(self, rows: int, seed: int, length: int, lag: int):
        self.rows, self.seed, self.length, self.lag = rows, seed, length, lag

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < self.rows:
            raise IndexError(index)
        generator = torch.Generator().manual_seed(self.seed * 10**9 + index)
        noise = torch.randn(self.length, generator=generator)
        spectrum = torch.fft.rfft(noise)  # (L/2 + 1,)
        spectrum[int(BAND * len(spectrum)) :] = 0
        signal = torch.fft.irfft(spectrum, n=self.length)
        signal = signal / signal.square().mean().sqrt()
        target = torch.cat([torch.zeros(self.lag), signal[: self.length - self.lag]])
        return {"signal": signal, "labels": target}
