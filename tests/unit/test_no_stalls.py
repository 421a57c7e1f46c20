"""Training and decoding on an accelerator never wait for a value, give what they give on the CPU, and start little.

On the meta device there are no values: reading one is an error. On the CPU, tests run the code of accelerators
(without `numerics.HOST_DEVICES`) and record what would make one wait, or how many operations a layer starts: a small
model on a GPU waits for launches, not for arithmetic. A budget is what a layer needed when it was set. It may be
lowered; who raises it says why. Views and allocations start nothing and are not counted.
"""

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import STATIC_LAYER_TYPE_MAPPING

from helpers.hybrids import HYBRIDS
from helpers.models import CAUSAL, VARIANTS, image_config, seeded, slow, tiny_config
from modeling_tnn import (
    TnnForCausalLM,
    TnnForImageClassification,
    TnnForMaskedLM,
    TnnForSequenceClassification,
    TnnForTimeSeriesPrediction,
    numerics,
)
from modeling_tnn.compile import static_cache
from modeling_tnn.configuration_tnn import TOEPLITZ
from modeling_tnn.tools.comparing import memory_per_sequence

WAITS = {"_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "_unique2", "equal"}
NO_LAUNCH = {"detach", "lift_fresh", "promote_types", "set_", "_unsafe_view", "empty", "empty_like", "empty_strided",
             "new_empty", "new_empty_strided"}  # fmt: skip
UNCONSTRAINED = {"rtf_constraint": None, "rtf_initializer": "xavier"}
LEARNED = {"learnable_decay": True, "decay": 0.9}
STEPS = [(*variant, {}) for variant in VARIANTS]
STEPS += [("rpe", True, {"norm_type": "batchnorm"}), ("rpe", False, {"position_embedding": "sinusoidal"})]
STEPS += [("rpe", True, LEARNED), ("rpe", True, HYBRIDS["sliding"]), ("fd", False, HYBRIDS["full"])]
# The fields of models that wait at the start of decoding: per layer, for its poles or its slowest decay.
DECODED = [*((name, {}) for name in CAUSAL), ("rtf", UNCONSTRAINED), ("rpe", LEARNED)]
WAITS_AT_START = {"rtf": 4, "rpe": 1}


class Waits(TorchDispatchMode):
    """Records the operations that need a value on the host, and counts those that start a kernel."""

    def __init__(self):
        super().__init__()
        self.found, self.launches = [], 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        masks = name in ("index", "index_put", "index_put_", "_index_put_impl_") and any(
            index is not None and index.dtype is torch.bool for index in args[1]
        )
        if name in WAITS or masks:
            self.found.append(name)
        self.launches += not function.is_view and name not in NO_LAUNCH
        return function(*args, **(kwargs or {}))


def language_model(tno_type: str, causal: bool, **fields):
    config = tiny_config(tno_type, causal, hidden_dropout_prob=0.0, **fields)
    return seeded(TnnForCausalLM if causal else TnnForMaskedLM, config)


def batch(padded: bool, device: str = "cpu"):
    ids = torch.randint(99, (2, 33), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    given = {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100)}
    return {name: tensor.to(device) for name, tensor in (given | ({"attention_mask": mask} if padded else {})).items()}


@pytest.mark.parametrize(("tno_type", "causal", "fields"), STEPS[::2] + slow(*STEPS[1::2]))
def test_a_training_step(tno_type, causal, fields, monkeypatch):
    """No wait, on the meta device too; loss, gradients and statistics are those of the CPU.

    With padding, transformers looks at the mask once or twice to choose a kernel of attention.
    """
    attention, results = "layer_types" in fields, []
    given = batch(not attention, "meta")
    language_model(tno_type, causal, **fields).to("meta").train()(**given).loss.backward()
    for hosts in (("cpu",), ()):
        monkeypatch.setattr(numerics, "HOST_DEVICES", hosts)
        model = language_model(tno_type, causal, **fields).double().train()
        with Waits() as waits:
            outputs = model(**batch(True))
            outputs.loss.backward()
        gradients = {name: p.grad for name, p in model.named_parameters()}
        results.append((outputs.loss, gradients, dict(model.named_buffers())))
    assert len(waits.found) <= 2 * attention, waits.found
    torch.testing.assert_close(*results)


@pytest.mark.parametrize(("tno_type", "causal"), [("rpe", True), ("fd", False), ("ski", False), ("rtf", True)])
def test_packed_rows(tno_type, causal, monkeypatch):
    """The documents are found on the host: their boundaries are on the CPU, as a collator makes them."""
    positions = torch.cat([torch.arange(12), torch.arange(21)]).expand(2, 33)
    given = batch(False, "meta") | {"position_ids": positions}
    language_model(tno_type, causal).to("meta").train()(**given).loss.backward()
    model, ids = language_model(tno_type, causal).double(), batch(False)["input_ids"]
    expected = torch.cat([model(part).logits for part in ids.split([12, 21], dim=1)], dim=1)
    monkeypatch.setattr(numerics, "HOST_DEVICES", ())
    torch.testing.assert_close(model(ids, position_ids=positions).logits, expected)


def test_classifiers():
    """Of texts with padding, and of images; forecasts of series with padding."""
    model = TnnForImageClassification(image_config()).to("meta").train()
    labels = torch.zeros(3, dtype=torch.long, device="meta")
    model(torch.zeros(3, 3, 24, 24, device="meta"), labels=labels).loss.backward()
    for causal in (True, False):
        model = TnnForSequenceClassification(tiny_config(causal=causal)).to("meta").train()
        model(**batch(True, "meta") | {"labels": labels[:2]}).loss.backward()
        fields = {"input_channels": 1, "prediction_length": 4}
        model = TnnForTimeSeriesPrediction(tiny_config("s4d", causal, **fields)).to("meta").train()
        past, mask = torch.zeros(2, 33, 1, device="meta"), torch.ones(2, 33, device="meta")
        given = {"past_observed_mask": past, "attention_mask": mask}
        model(past, **given, future_values=past[:, :4]).loss.backward()
        assert model.eval().generate(past, **given, prediction_length=9).sequences.shape == (2, 1, 9, 1)


@torch.no_grad()
def decode(model, ids, prompt: int, cache) -> torch.Tensor:
    """The logits of all tokens but those of the prompt, padded in the first row, which are read one by one."""
    mask, logits = torch.ones_like(ids), []
    mask[0, : prompt // 3] = 0
    for start, end in ((0, prompt), *((t, t + 1) for t in range(prompt, ids.shape[1]))):
        given = {"past_key_values": cache, "use_cache": True, "attention_mask": mask[:, :end]}
        if start:
            given = model.prepare_inputs_for_generation(ids[:, :end], next_sequence_length=1, **given)
        else:
            given["input_ids"] = ids[:, :end]
        logits.append(model(**given).logits)
    return torch.cat(logits[1:], dim=1)


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize(("tno_type", "fields"), DECODED[:1] + slow(*DECODED[1:-2]) + DECODED[-2:])
def test_decoding(tno_type, fields, fixed, monkeypatch):
    """No wait but the few at the start, and a look every 64 tokens at a recurrence that may diverge.

    On the meta device too; with steps of fixed shape as a compiler records them.
    """
    model, ids = language_model(tno_type, True, **fields), torch.arange(80).expand(2, -1)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    expected = model(ids, attention_mask=mask, use_cache=False).logits[:, 9:]
    monkeypatch.setattr(numerics, "HOST_DEVICES", ())
    cache = DynamicCache(config=model.config)
    if fixed:
        monkeypatch.setattr(static_cache, "is_traced", lambda: True)
        # A test of remote code may have put the class of its copy of the package there.
        monkeypatch.setitem(STATIC_LAYER_TYPE_MAPPING, TOEPLITZ, static_cache.TnnStaticCacheLayer)
        cache = StaticCache(config=model.config, max_cache_len=80)
    with Waits() as waits:
        found = decode(model, ids, 9, cache)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    looks = 80 // 64 + 1 if fields == UNCONSTRAINED else 0
    start = WAITS_AT_START.get(tno_type, 0) if fields or tno_type == "rtf" else 0
    assert len(waits.found) <= len(model.model.layers) * (looks + start), waits.found
    if not fixed and not start:
        decode(model.to("meta"), ids[:, :20].to("meta"), 9, DynamicCache(config=model.config))


@pytest.mark.parametrize("prompt", [3, *slow(150)])
@torch.no_grad()
def test_a_learned_decay_bounds_the_state(prompt, monkeypatch):
    """Its number of taps is read when the text is continued, also by a copy of the model."""
    model = language_model("rpe", True, learnable_decay=True, decay=0.5).double()
    for layer in model.model.layers:
        layer.mixer.tno.decay_logit.sub_(5)
    ids = torch.randint(99, (2, 250), generator=torch.Generator().manual_seed(0))
    expected, sizes = model(ids, use_cache=False).logits[:, -1:], []
    for hosts in (("cpu",), ()):
        monkeypatch.setattr(numerics, "HOST_DEVICES", hosts)
        cache = model(ids[:, :prompt], use_cache=True).past_key_values
        for t in range(prompt, 250):
            found = (copy.deepcopy(model) if t == 200 else model)(ids[:, t : t + 1], past_key_values=cache).logits
        torch.testing.assert_close(found, expected)
        sizes.append(memory_per_sequence(cache))
    assert sizes[0] == sizes[1]


def test_a_recurrence_that_diverges_is_found(monkeypatch):
    """Some tokens later than on the CPU."""
    monkeypatch.setattr(numerics, "HOST_DEVICES", ())
    model = language_model("rtf", True, **UNCONSTRAINED)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mixer.tno.denominator.zero_()
            layer.mixer.tno.denominator[0, 0] = -1.5
    with pytest.raises(ValueError, match="makes the recurrence diverge"):
        decode(model, torch.ones(1, 4000, dtype=torch.long), 9, DynamicCache(config=model.config))


# (operator, causal) -> launches of a layer.
TRAINING = dict.fromkeys(VARIANTS, 105) | {
    ("rtf", True): 106, ("ski", False): 142, ("rtf", False): 108, ("s4d", False): 109,
}  # fmt: skip
TOKEN = {(name, True): 31 if name == "rtf" else 25 for name in CAUSAL}
IDS = torch.arange(80).view(2, 40)


def training_step(model) -> int:
    with Waits() as waits:
        model.train()(IDS, labels=IDS).loss.backward()
    return waits.launches


@torch.no_grad()
def token(model) -> int:
    cache = model(IDS, use_cache=True).past_key_values
    for _ in range(6):  # the first token after a prompt makes the state
        with Waits() as waits:
            model(IDS[:, :1], past_key_values=cache)
    return waits.launches


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="other versions have other operations")
@pytest.mark.parametrize(("launches", "budget"), [(training_step, TRAINING), (token, TOKEN)])
def test_launches_of_a_layer(launches, budget, monkeypatch):
    """The difference between a model of three layers and one of two."""
    monkeypatch.setattr(numerics, "HOST_DEVICES", ())
    for variant, most in budget.items():
        three, two = (launches(language_model(*variant, num_hidden_layers=layers)) for layers in (3, 2))
        assert three - two <= most, variant
