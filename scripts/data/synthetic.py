"""Tasks that measure what a layer can remember, and what it can find.

    Copying   t_1 .. t_M, then markers: after each marker but the last, the next of the M tokens
    Delay     a band-limited random signal of unit power: the same signal, `lag` steps later
    Recall    k_1 v_1 .. k_M v_M, then the keys again, somewhere, in another order: for each its value
    Passkey   noise with a marker and M tokens somewhere; a marker at the end: after it the M tokens

M tokens or pairs to remember, L length. All follow from a seed and are endless. The rows of tokens are for causal
language models, whose loss shifts the labels; the last of `num_tokens` is the marker. Copying and Delay are those of
the RTF paper (table 2, appendix C.3). Recall is multi-query associative recall (Arora et al. 2023, "Zoology", section
4). Passkey follows Mohtashami and Jaggi 2023, section 4.2, with tokens for words.
"""

from dataclasses import dataclass

import torch
from torch.utils.data import Dataset

# Fraction of the frequencies that a signal has; the others are zero.
BAND = 0.5
IGNORED = -100


@dataclass(eq=False)
class SyntheticRows(Dataset):
    """`rows` rows by a seed, which are drawn when they are asked for."""

    rows: int
    seed: int

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < self.rows:
            raise IndexError(index)
        return self.draw(torch.Generator().manual_seed(self.seed * 10**9 + index))

    def draw(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        raise NotImplementedError


@dataclass(eq=False)
class Copying(SyntheticRows):
    """Copying of M = `memory` tokens."""

    memory: int
    num_tokens: int

    def draw(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        marker = self.num_tokens - 1
        tokens = torch.randint(marker, (self.memory,), generator=generator)  # (M,)
        input_ids = torch.cat([tokens, torch.full((self.memory + 1,), marker)])  # (2M + 1,)
        labels = torch.cat([torch.full((self.memory + 1,), IGNORED), tokens])  # (2M + 1,)
        return {"input_ids": input_ids, "labels": labels}


@dataclass(eq=False)
class Delay(SyntheticRows):
    """Signals of `length` L, and the same ones `lag` steps later."""

    length: int
    lag: int

    def draw(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        spectrum = torch.fft.rfft(torch.randn(self.length, generator=generator))  # (L/2 + 1,)
        spectrum[int(BAND * len(spectrum)) :] = 0
        signal = torch.fft.irfft(spectrum, n=self.length)
        signal = signal / signal.square().mean().sqrt()
        target = torch.cat([torch.zeros(self.lag), signal[: self.length - self.lag]])
        return {"signal": signal, "labels": target}


@dataclass(eq=False)
class Recall(SyntheticRows):
    """Recall of M = `pairs` in L = `length` tokens, at least 3 M + 1.

    The first half of the vocabulary, at least 2 M + 1 tokens, are keys, the second half values; its last token fills
    the places between queries.
    """

    pairs: int
    length: int
    num_tokens: int

    def draw(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        half, told = (self.num_tokens - 1) // 2, 2 * self.pairs
        keys = torch.randperm(half, generator=generator)[: self.pairs]  # (M,)
        values = half + torch.randint(half, (self.pairs,), generator=generator)  # (M,)
        asked = torch.randperm(self.pairs, generator=generator)  # (M,)
        places = told + torch.randperm(self.length - 1 - told, generator=generator)[: self.pairs]  # (M,)
        input_ids = torch.full((self.length,), self.num_tokens - 1)  # (L,)
        input_ids[:told] = torch.stack([keys, values], dim=1).flatten()
        input_ids[places] = keys[asked]
        labels = torch.full((self.length,), IGNORED)  # (L,)
        labels[places + 1] = values[asked]  # after its key; the values are not shown again
        return {"input_ids": input_ids, "labels": labels}


@dataclass(eq=False)
class Passkey(SyntheticRows):
    """A passkey of M = `digits` tokens in L = `length` tokens, at least 2 M + 2.

    The first half of the vocabulary is noise, the second half are tokens of passkeys.
    """

    digits: int
    length: int
    num_tokens: int

    def draw(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        marker, half, said = self.num_tokens - 1, (self.num_tokens - 1) // 2, self.digits + 1
        input_ids = torch.randint(half, (self.length,), generator=generator)  # (L,)
        start = int(torch.randint(self.length - 2 * said + 1, (), generator=generator))
        digits = half + torch.randint(half, (self.digits,), generator=generator)  # (M,)
        for place in (start, self.length - said):
            input_ids[place], input_ids[place + 1 : place + said] = marker, digits
        labels = torch.full((self.length,), IGNORED)  # (L,)
        labels[-self.digits :] = input_ids[-self.digits :]
        return {"input_ids": input_ids, "labels": labels}
