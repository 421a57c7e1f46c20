# %% [markdown]
# # Look inside: kernels, horizon, recurrence, an operator of your own
#
# Install: `pip install ".[training]"` in a clone.

# %%
import matplotlib.pyplot as plt
import torch
from torch import nn

from modeling_tnn import (
    TnnConfig,
    TnnForCausalLM,
    ToeplitzOperator,
    causal_toeplitz_matmul,
    dense_toeplitz,
    register_operator,
)

torch.manual_seed(0)
model = TnnForCausalLM(TnnConfig(vocab_size=100, hidden_size=32, num_hidden_layers=2, decay=0.95)).eval()

# %% [markdown]
# ## Kernels
#
# Each layer has one Toeplitz operator, and each of its channels one kernel: the coefficients at the lags 0, 1, 2, ...

# %%
with torch.no_grad():
    kernels = [layer.mixer.tno.coefficients(128) for layer in model.model.layers]  # (D, 128) each
figure, axes = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
for axis, kernel, number in zip(axes, kernels, range(2), strict=True):
    axis.plot(kernel[:5].T)
    axis.set(title=f"layer {number}, five channels", xlabel="lag")

# %% [markdown]
# ## The product
#
# The fast product equals the product with the dense matrix.

# %%
values = torch.randn(1, 50, kernels[0].shape[0])  # (B, L, D)
fast = causal_toeplitz_matmul(values, kernels[0][:, :50])
two_sided = torch.cat([torch.zeros_like(kernels[0][:, :49]), kernels[0][:, :50]], dim=1)  # lags -49 .. 49
dense = torch.einsum("dij,bjd->bid", dense_toeplitz(two_sided), values)
print(f"largest difference {(fast - dense).abs().max():.1e}")
torch.testing.assert_close(fast, dense, rtol=1e-4, atol=1e-5)

# %% [markdown]
# ## Horizon
#
# The horizon of a channel is the lag below which 90% of its weight lies. `tnn plot-kernels` draws it for any model.

# %%
share = kernels[0].abs().cumsum(dim=1) / kernels[0].abs().sum(dim=1, keepdim=True)
horizon = (share < 0.9).sum(dim=1)
print(f"median horizon {int(horizon.median())} positions")
assert 0 < horizon.median() < 128

# %% [markdown]
# ## A recurrence
#
# A sum of exponentials replaces each kernel beyond its first taps. The converted model decodes with a small state.

# %%
converted, report = model.to_recurrent(order=32, window=16)
ids = torch.randint(100, (1, 200))
with torch.no_grad():
    difference = (converted(ids).logits - model(ids).logits).abs().max()
print(f"{converted.config.tno_type}, largest difference of the logits {difference:.1e}")
assert difference < 1e-2
same = [one.generate(ids[:, :20], max_new_tokens=20, do_sample=False) for one in (model, converted)]
print("the same text:", torch.equal(*same))

# %% [markdown]
# ## An operator of your own
#
# An operator is a class that returns coefficients. This one is a sum of exponentials with learned rates.


# %%
class FadingOperator(ToeplitzOperator):
    supports_bidirectional = False

    def __init__(self, config, layer_idx: int = 0):
        super().__init__(config, layer_idx)
        self.amplitudes = nn.Parameter(torch.empty(self.channels, 4))  # (D, N)
        self.rates = nn.Parameter(torch.empty(self.channels, 4))  # (D, N)

    def reset_parameters(self):
        nn.init.normal_(self.amplitudes, std=0.5)
        nn.init.uniform_(self.rates, -3.0, 3.0)

    def coefficients(self, length: int, device: torch.device | None = None) -> torch.Tensor:
        amplitudes, rates = (x.float().to(device or x.device) for x in (self.amplitudes, self.rates))
        lags = torch.arange(length, device=rates.device)  # (L,)
        return (amplitudes[..., None] * torch.sigmoid(rates)[..., None] ** lags).sum(dim=1)  # (D, L)


register_operator("fading", FadingOperator)
mine = TnnForCausalLM(TnnConfig(tno_type="fading", vocab_size=100, hidden_size=32, num_hidden_layers=2)).eval()
cached = mine.generate(ids[:, :20], max_new_tokens=20, do_sample=False)
uncached = mine.generate(ids[:, :20], max_new_tokens=20, do_sample=False, use_cache=False)
print("decoding with the cache gives the same text:", torch.equal(cached, uncached))
assert torch.equal(cached, uncached)
