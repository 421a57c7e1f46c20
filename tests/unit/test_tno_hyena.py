"""The operator `hyena`: the implicit filter, by its definition and as released, and where it ends."""

import math

import numpy as np
import pytest
import torch

from helpers.models import relative_error, seeded, slow, tiny_config
from helpers.operators import OperatorTests, random_operator
from modeling_tnn import TnnForCausalLM, TnnModel
from modeling_tnn.tno_hyena import HyenaOperator


class TestHyena(OperatorTests):
    tno_type = "hyena"


def naive_taps(operator: HyenaOperator, sides: int) -> np.ndarray:
    """Equations (1) to (3) for one position and one channel after the other, without d, `(sides, D, M)`."""
    weights = [layer.weight.detach().numpy() for layer in operator.layers]
    biases = [layer.bias.detach().numpy() for layer in operator.layers[:-1]]
    freq, count, bands = operator.freq.detach().numpy(), operator.longest, (operator.features.shape[1] - 1) // 2
    taps = np.zeros((sides, operator.channels, count))
    for k in range(count):
        time, turn = k / (count - 1), 2 * math.pi * k / count
        frequencies = [1e-4 + (bands - 1 - 1e-4) * band / max(1, bands - 1) for band in range(bands)]
        x = [time, *(math.cos(f * turn) for f in frequencies), *(-math.sin(f * turn) for f in frequencies)]
        for weight, bias in zip(weights, biases, strict=False):
            x = np.sin(freq * (weight @ x + bias))
        for row, value in enumerate(weights[-1] @ x):
            side, channel = divmod(row, operator.channels)
            fastest, slowest = math.log(0.01) / 0.3, math.log(0.01) / 1.5
            delta = slowest + (fastest - slowest) * channel / (operator.channels - 1)
            taps[side, channel, k] = value * (math.exp(-time * abs(delta)) + 0.05)
    return taps


@pytest.mark.parametrize("causal", [True, False])
def test_the_filter_by_its_definition(causal):
    """At any length, and zero from M on; what is stored is rounded to float32."""
    for size, inner in ((3, 0), (5, 2), (9, 1)):
        fields = {"hyena_filter_emb_dim": size, "hyena_filter_inner_mlps": inner, "hyena_filter_length": 21}
        operator = random_operator("hyena", causal, hidden_size=3, **fields)
        taps = naive_taps(operator, 1 if causal else 2)
        expected = np.pad(taps[0], ((0, 0), (0, 19)))
        expected[:, 0] += operator.direct.detach().numpy()
        for length in (1, 2, 3, 17, 21, 22, 40):
            negative = [] if causal else [np.pad(taps[1][:, :20], ((0, 0), (0, 20)))[:, : length - 1][:, ::-1]]
            whole = np.concatenate([*negative, expected[:, :length]], axis=1)
            assert relative_error(operator.coefficients(length), torch.tensor(whole.copy())) < 1e-6, length


def test_constants_stay_in_float32(tmp_path):
    """In every way to make a model of another precision, and they are those that were saved."""
    model = seeded(TnnForCausalLM, tiny_config("hyena"))
    for layer in model.model.layers:
        layer.mixer.tno.features.mul_(1.5)
    model.save_pretrained(tmp_path)
    loaded = TnnForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    for one in (loaded, loaded.to(torch.float16), TnnForCausalLM._from_config(model.config, dtype=torch.bfloat16)):
        operator = one.model.layers[1].mixer.tno
        exact = {name for name, value in operator.state_dict().items() if value.dtype is torch.float32}
        assert exact == {"freq", "times", "features", "rates"}
    assert torch.equal(loaded.model.layers[1].mixer.tno.features, model.model.layers[1].mixer.tno.features)


@pytest.mark.parametrize("implementation", [None, "static"])
def test_the_end_of_the_filter(implementation):
    """Sequences end with it, token by token and in chunks, unless zeros may follow."""
    fields = {"eos_token_id": None, "toeplitz_mixer": "hyena", "hyena_filter_length": 30}
    model = seeded(TnnForCausalLM, tiny_config("hyena", hyena_filter_beyond="error", **fields))
    ids = torch.arange(3, 35)[None]
    message = "`hyena_filter_length` must be at least 31, the length of the sequence, got 30. hyena_filter_beyond="
    options = {"do_sample": False, "pad_token_id": 1, "cache_implementation": implementation}
    assert model.generate(ids[:, :20], max_new_tokens=11, **options).shape[1] == 31  # the last one is not read
    cache = model(ids[:, :20], use_cache=True).past_key_values
    for call in (
        lambda: model(ids[:, :31]),
        lambda: model(ids[:, 20:31], past_key_values=cache),
        lambda: model.generate(ids[:, :20], max_new_tokens=12, **options),
        lambda: model.generate(ids[:, :31], max_new_tokens=1, **options),
    ):
        with torch.no_grad(), pytest.raises(ValueError, match=message):
            call()
    model.config.hyena_filter_beyond = "zeros"
    zeros = TnnForCausalLM(model.config).eval()
    zeros.load_state_dict(model.state_dict())
    assert torch.equal(zeros(ids[:, :30]).logits, model(ids[:, :30]).logits)
    assert zeros.generate(ids, max_new_tokens=9, **options).shape[1] == 41


@pytest.mark.parametrize("causal", [True, *slow(False)])
@torch.no_grad()
def test_packed_rows_longer_than_the_filter(causal):
    """It limits each document, in a graph too, which serves all of them."""
    fields = {"hyena_filter_length": 30, "hyena_filter_beyond": "error"}
    model = seeded(TnnModel, tiny_config("hyena", causal, **fields)).double()
    compiled, ids = torch.compile(model, backend="eager", fullgraph=True), torch.arange(3, 63)[None]

    def positions(*lengths):
        return torch.cat([torch.arange(length) for length in lengths])[None]

    for lengths in ((30, 30), (17, 29, 14)):
        alone = [model(part, use_cache=False).last_hidden_state for part in ids.split(lengths, dim=1)]
        for call in (model, compiled):
            found = call(ids, position_ids=positions(*lengths), use_cache=False).last_hidden_state
            assert relative_error(found, torch.cat(alone, dim=1)) < 1e-9
    for call in (model, compiled):
        with pytest.raises(ValueError, match="`hyena_filter_length` must be at least 31, .*, got 30"):
            call(ids, position_ids=positions(29, 31), use_cache=False)


def test_to_recurrent(monkeypatch):
    """A new filter is nearly one of low order. What ends beyond the fitted taps has no bound."""
    model = seeded(TnnForCausalLM, tiny_config("hyena", toeplitz_mixer="hyena", eos_token_id=None)).double()
    converted, reports = model.to_recurrent(order=32)
    ids = torch.arange(3, 67)[None]
    assert converted.config.converted_from == "hyena" and max(one.l2_layer for one in reports) < 5e-2
    assert relative_error(converted(ids).logits, model(ids).logits) < 5e-2
    assert all(one.tail_bound < math.inf for one in reports)
    monkeypatch.setattr("modeling_tnn.tools.recurrent.MOST_TAPS", 40)
    assert all(one.tail_bound == math.inf for one in model.to_recurrent(order=8)[1])
