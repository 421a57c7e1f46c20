"""Training and decoding on an accelerator never wait for a value, and give what they give on the CPU.

On the meta device there are no values: reading one is an error. On the CPU, tests run the code of accelerators
(without `numerics.HOST_DEVICES`) and record what would make one wait.
"""

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import StaticCache
from transformers.cache_utils import STATIC_LAYER_TYPE_MAPPING

from helpers.hybrids import HYBRIDS
from helpers.models import CAUSAL, VARIANTS, seeded, tiny_config
from modeling_tnn import (
    TnnForCausalLM,
    TnnForImageClassification,
    TnnForMaskedLM,
    TnnForSequenceClassification,
    numerics,
)
from modeling_tnn.cache_tnn import memory_per_sequence
from modeling_tnn.compile import static_cache
from modeling_tnn.configuration_tnn import TOEPLITZ

WAITS = {"_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "_unique2", "equal"}
UNCONSTRAINED = {"rtf_constraint": None, "rtf_initializer": "xavier"}
STEPS = [(*variant, {}) for variant in VARIANTS]
STEPS += [("rpe", True, {"norm_type": "batchnorm"}), ("rpe", False, {"position_embedding": "sinusoidal"})]
STEPS += [("rpe", True, {"learnable_decay": True, "decay": 0.9})]
WITH_ATTENTION = [("rpe", True, HYBRIDS["full"]), ("rpe", True, HYBRIDS["sliding"]), ("fd", False, HYBRIDS["full"])]
# The fields of models that wait at the start of decoding: per layer, for its poles or its slowest decay.
DECODED = [*((name, {}) for name in CAUSAL), ("rtf", UNCONSTRAINED), ("rpe", {"learnable_decay": True, "decay": 0.9})]
WAITS_AT_START = {"rtf": 4, "rpe": 1}


class Waits(TorchDispatchMode):
    """Records the operations that need a value on the host."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        masks = name in ("index", "index_put", "index_put_", "_index_put_impl_") and any(
            index is not None and index.dtype is torch.bool for index in args[1]
        )
        if name in WAITS or masks:
            self.found.append(name)
        return function(*args, **(kwargs or {}))


@pytest.fixture
def accelerator(monkeypatch):
    monkeypatch.setattr(numerics, "HOST_DEVICES", ())


def language_model(tno_type: str, causal: bool, **fields):
    config = tiny_config(tno_type, causal, hidden_dropout_prob=0.0, **fields)
    return seeded(TnnForCausalLM if causal else TnnForMaskedLM, config)


def batch(padded: bool, device: str = "cpu"):
    ids = torch.randint(99, (2, 33), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    given = {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100)}
    return {name: tensor.to(device) for name, tensor in (given | ({"attention_mask": mask} if padded else {})).items()}


def decode(model, inputs, tokens: int):
    """The logits of the prompt's last token and of `tokens` further ones, `(tokens + 1, B, V)`."""
    mask, ids = inputs.get("attention_mask"), inputs["input_ids"]
    logits = []
    with torch.no_grad():
        outputs = model(ids, attention_mask=mask, use_cache=True)
        for t in range(tokens):
            logits.append(outputs.logits[:, -1])
            mask = None if mask is None else torch.cat([mask, mask[:, -1:]], dim=1)
            chosen = ids[:, t % 7 : t % 7 + 1]
            outputs = model(chosen, attention_mask=mask, past_key_values=outputs.past_key_values)
    return torch.stack([*logits, outputs.logits[:, -1]])


@pytest.mark.parametrize(("tno_type", "causal", "fields"), STEPS)
def test_a_training_step_on_the_meta_device(tno_type, causal, fields, paddings=(False, True)):
    for padded in paddings:
        model = language_model(tno_type, causal, **fields).to("meta").train()
        model(**batch(padded, "meta")).loss.backward()
        classifier = TnnForSequenceClassification(tiny_config(tno_type, causal, **fields)).to("meta").train()
        given = batch(padded, "meta")
        classifier(**given | {"labels": given["labels"][:, 0]}).loss.backward()


@pytest.mark.slow
@pytest.mark.parametrize(("tno_type", "fields"), DECODED)
def test_decoding_on_the_meta_device(tno_type, fields):
    decode(language_model(tno_type, True, **fields).to("meta"), batch(True, "meta"), 300)


@pytest.mark.parametrize(("tno_type", "causal", "fields"), WITH_ATTENTION)
def test_a_training_step_of_a_hybrid(tno_type, causal, fields, accelerator):
    """No wait without padding. With padding transformers looks at the mask once or twice to choose a kernel."""
    test_a_training_step_on_the_meta_device(tno_type, causal, fields, paddings=[False])
    for padded, most in ((False, 0), (True, 2)):
        with Waits() as waits:
            language_model(tno_type, causal, **fields).train()(**batch(padded)).loss.backward()
        assert len(waits.found) <= most, waits.found


def test_images_on_the_meta_device():
    config = tiny_config(causal=False, image_size=8, patch_size=2, max_position_embeddings=16)
    model = TnnForImageClassification(config).to("meta").train()
    pixels = torch.zeros(3, 3, 8, 8, device="meta")
    model(pixels, labels=torch.zeros(3, dtype=torch.long, device="meta")).loss.backward()


def packed(device: str):
    given = batch(False, device)
    positions = torch.cat([torch.arange(12), torch.arange(21)]).expand(2, 33)
    return given | {"position_ids": positions}


@pytest.mark.parametrize(("tno_type", "causal"), VARIANTS)
def test_packed_rows_on_the_meta_device(tno_type, causal):
    """Their boundaries are on the CPU, as a collator makes them."""
    language_model(tno_type, causal).to("meta").train()(**packed("meta")).loss.backward()


@pytest.mark.parametrize(("tno_type", "causal", "fields"), STEPS)
def test_a_training_step_of_an_accelerator(tno_type, causal, fields, monkeypatch):
    """No wait, and loss, gradients and statistics of the CPU."""
    results = []
    for hosts in (("cpu",), ()):
        monkeypatch.setattr(numerics, "HOST_DEVICES", hosts)
        model = language_model(tno_type, causal, **fields).double().train()
        with Waits() as waits:
            outputs = model(**batch(padded=not fields))
            outputs.loss.backward()
        gradients = {name: p.grad for name, p in model.named_parameters()}
        results.append((outputs.loss, gradients, dict(model.named_buffers())))
    assert waits.found == []
    torch.testing.assert_close(*results)


@pytest.mark.parametrize(("tno_type", "fields"), DECODED)
def test_decoding_of_an_accelerator(tno_type, fields, monkeypatch):
    """No wait but the few at the start, and a look every 64 tokens at a recurrence that may diverge."""
    model = language_model(tno_type, True, **fields)
    expected = decode(model, batch(padded=True), 300)
    monkeypatch.setattr(numerics, "HOST_DEVICES", ())
    with Waits() as waits:
        logits = decode(model, batch(padded=True), 300)
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    layers = len(model.model.layers)
    looks = layers * (300 // 64 + 1) if fields == UNCONSTRAINED else 0
    start = layers * WAITS_AT_START.get(tno_type, 0) if fields or tno_type == "rtf" else 0
    assert len(waits.found) <= looks + start, waits.found


@pytest.mark.parametrize("prompt", [3, 150])
def test_a_learned_decay_bounds_the_state(prompt, monkeypatch):
    """Its number of taps is read when the text is continued, also by a copy of the model."""
    model = language_model("rpe", True, learnable_decay=True, decay=0.5).double()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mixer.tno.decay_logit.sub_(5)
    ids = torch.randint(99, (2, 250), generator=torch.Generator().manual_seed(0))
    sizes = []
    for hosts in (("cpu",), ()):
        monkeypatch.setattr(numerics, "HOST_DEVICES", hosts)
        with torch.no_grad():
            cache = model(ids[:, :prompt], use_cache=True).past_key_values
            for t in range(prompt, 250):
                found = (model if t % 2 else copy.deepcopy(model))(ids[:, t : t + 1], past_key_values=cache).logits
            expected = model(ids, use_cache=False).logits[:, -1:]
        torch.testing.assert_close(found, expected)
        sizes.append(memory_per_sequence(cache))
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize(("tno_type", "causal"), VARIANTS)
def test_packed_rows_of_an_accelerator(tno_type, causal, accelerator):
    """The documents are found on the host: the operations that wait there are those of the boundaries."""
    model = language_model(tno_type, causal).double()
    documents = [
        {name: tensor[:, part] for name, tensor in packed("cpu").items()} for part in (slice(12), slice(12, 33))
    ]
    expected = torch.cat([model(document["input_ids"]).logits for document in documents], dim=1)
    given = packed("cpu")
    torch.testing.assert_close(model(given["input_ids"], position_ids=given["position_ids"]).logits, expected)


def test_a_recurrence_that_diverges_is_found_on_an_accelerator(accelerator):
    """Some tokens later than on the CPU."""
    model = language_model("rtf", True, **UNCONSTRAINED)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mixer.tno.denominator.zero_()
            layer.mixer.tno.denominator[0, 0] = -1.1
    with pytest.raises(ValueError, match="makes the recurrence diverge"):
        decode(model, batch(False), 10_000)


@pytest.mark.parametrize(("tno_type", "fields"), DECODED)
def test_steps_of_fixed_shape_of_an_accelerator(tno_type, fields, monkeypatch):
    """No wait but those of the start and the looks; the same logits. The steps run as a compiler records them."""
    model = language_model(tno_type, True, **fields)
    text = torch.arange(160).remainder(90).view(1, -1).expand(2, -1)
    expected = model(text, use_cache=False).logits[:, 9:]
    monkeypatch.setattr(numerics, "HOST_DEVICES", ())
    monkeypatch.setattr(static_cache, "is_traced", lambda: True)
    # A test of remote code may have put the class of its copy of the package there.
    monkeypatch.setitem(STATIC_LAYER_TYPE_MAPPING, TOEPLITZ, static_cache.TnnStaticCacheLayer)
    cache = StaticCache(config=model.config, max_cache_len=160)
    logits = []
    with torch.no_grad(), Waits() as waits:
        model(text[:, :9], past_key_values=cache)
        for position in range(9, 160):
            given = {"next_sequence_length": 1, "past_key_values": cache, "use_cache": True}
            inputs = model.prepare_inputs_for_generation(text[:, : position + 1], **given)
            logits.append(model(**inputs).logits)
    torch.testing.assert_close(torch.cat(logits, dim=1), expected, rtol=1e-5, atol=1e-5)
    layers = len(model.model.layers)
    looks = layers * (160 // 64 + 1) if fields == UNCONSTRAINED else 0
    start = layers * WAITS_AT_START.get(tno_type, 0) if fields or tno_type == "rtf" else 0
    assert len(waits.found) <= looks + start, waits.found
