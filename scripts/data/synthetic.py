"""Tasks that measure what a layer can remember, and what it can find.

    Copying            t_1 .. t_M, then markers: after each marker but the last, the next of the M tokens
    SelectiveCopying   the same with noise before, between and behind the M tokens
    Delay              a band-limited random signal of unit power: the same signal, `lag` steps later
    DelayedTokens      random tokens: at each place the token of M places before
    Recall             k_1 v_1 .. k_M v_M, then the keys again, somewhere, in another order: for each its value
    Passkey            noise with a marker and M tokens somewhere; a marker at the end: after it the M tokens

M tokens or pairs to remember, L length. All follow from a seed and are endless. The rows of tokens are for causal
language models, whose loss shifts the labels; the last of `num_tokens` is the marker, the first half of the others are
noise or keys. Copying and Delay are those of the RTF paper (table 2, appendix C.3). SelectiveCopying follows Gu and
Dao 2023 ("Mamba", section 4.1), with noise of many tokens. Recall is multi-query associative recall (Arora et al.
2023, "Zoology", section 4). Passkey follows Mohtashami and Jaggi 2023, section 4.2, with tokens for words.
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
class TokenRows(SyntheticRows):
    """Rows of L = `length` out of `num_tokens` tokens, with M = `memory` tokens or pairs to remember."""

    memory: int
    length: int
    num_tokens: int

    @property
    def half(self) -> int:
        """The number of tokens that are noise or keys, and of those to remember."""
        return (self.num_tokens - 1) // 2

    @property
    def marker(self) -> int:
        return self.num_tokens - 1


class Copying(TokenRows):
    """Copying of M tokens in L = 2 M + 1."""

    def draw(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        return self.copied(torch.randint(self.marker, (self.memory,), generator=generator), torch.arange(self.memory))

    def copied(self, said: torch.Tensor, places: torch.Tensor) -> dict[str, torch.Tensor]:
        """The row that begins with `said`, to copy what stands at `places`, `(M,)`."""
        input_ids = torch.cat([said, torch.full((self.memory + 1,), self.marker)])  # (L,)
        labels = torch.full_like(input_ids, IGNORED)
        labels[-self.memory :] = said[places]
        return {"input_ids": input_ids, "labels": labels}


class SelectiveCopying(Copying):
    """Copying of M tokens, in their order, out of noise: L tokens, at least 2 M + 1."""

    def draw(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        said = torch.randint(self.half, (self.length - self.memory - 1,), generator=generator)  # (L - M - 1,)
        places = torch.randperm(len(said), generator=generator)[: self.memory].sort().values  # (M,)
        said[places] = self.half + torch.randint(self.half, (self.memory,), generator=generator)
        return self.copied(said, places)


class DelayedTokens(TokenRows):
    """A delay of M places in L tokens, at least M + 2."""

    def draw(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        input_ids = torch.randint(self.marker, (self.length,), generator=generator)  # (L,)
        labels = torch.full((self.length,), IGNORED)  # (L,)
        labels[self.memory + 1 :] = input_ids[: -self.memory - 1]  # the loss shifts them by one
        return {"input_ids": input_ids, "labels": labels}


class Recall(TokenRows):
    """Recall of M pairs in L tokens, at least 3 M + 1, out of at least 2 M + 1; the marker fills the rest."""

    def draw(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        half, told = self.half, 2 * self.memory
        keys = torch.randperm(half, generator=generator)[: self.memory]  # (M,)
        values = half + torch.randint(half, (self.memory,), generator=generator)  # (M,)
        asked = torch.randperm(self.memory, generator=generator)  # (M,)
        places = told + torch.randperm(self.length - 1 - told, generator=generator)[: self.memory]  # (M,)
        input_ids = torch.full((self.length,), self.marker)  # (L,)
        input_ids[:told] = torch.stack([keys, values], dim=1).flatten()
        input_ids[places] = keys[asked]
        labels = torch.full((self.length,), IGNORED)  # (L,)
        labels[places + 1] = values[asked]  # after its key; the values are not shown again
        return {"input_ids": input_ids, "labels": labels}


class Passkey(TokenRows):
    """A passkey of M tokens in L tokens, at least 2 M + 2."""

    def draw(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        half, said = self.half, self.memory + 1
        input_ids = torch.randint(half, (self.length,), generator=generator)  # (L,)
        start = int(torch.randint(self.length - 2 * said + 1, (), generator=generator))
        digits = half + torch.randint(half, (self.memory,), generator=generator)  # (M,)
        for place in (start, self.length - said):
            input_ids[place], input_ids[place + 1 : place + said] = self.marker, digits
        labels = torch.full((self.length,), IGNORED)  # (L,)
        labels[-self.memory :] = input_ids[-self.memory :]
        return {"input_ids": input_ids, "labels": labels}
