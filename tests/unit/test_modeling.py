"""The behaviour of transformers models: outputs, losses, gradients, precision, tracing."""

import copy
import math
import pickle

import pytest
import torch
from transformers import Trainer, TrainingArguments

from helpers.models import (
    BIDIRECTIONAL,
    CAUSAL,
    VARIANTS,
    checkpoint_activations,
    exhaustive,
    relative_error,
    seeded,
    tiny_config,
)
from modeling_tnn import TnnForCausalLM, TnnForMaskedLM, TnnForSequenceClassification, TnnModel

NORMS = ["simplermsnorm", "rmsnorm", "gatedrmsnorm", "scalenorm", "layernorm"]
LANGUAGE_MODELS = [(TnnForCausalLM, t, True) for t in CAUSAL] + [(TnnForMaskedLM, t, False) for t in BIDIRECTIONAL]
HEADS = LANGUAGE_MODELS + [(TnnForSequenceClassification, t, c) for t, c in VARIANTS]


def few(*usual: tuple[str, bool]) -> list:
    """Language models; the usual tests compile those of `usual` alone, since compiling is slow."""
    return [one for model in LANGUAGE_MODELS for one in ([model] if model[1:] in usual else exhaustive(model))]


EVERY_HEAD = pytest.mark.parametrize("head, tno_type, causal", HEADS)


def batch(length=19, rows=3) -> dict[str, torch.Tensor]:
    """Ids and a mask with padding on the right of the second row."""
    generator = torch.Generator().manual_seed(3)
    mask = torch.ones(rows, length, dtype=torch.long)
    mask[1, -length // 3 :] = 0
    return {"input_ids": torch.randint(99, (rows, length), generator=generator), "attention_mask": mask}


def labels_for(model) -> torch.Tensor:
    if isinstance(model, TnnForSequenceClassification):
        return torch.tensor([0, 1, 1])
    return batch()["input_ids"].masked_fill(batch()["attention_mask"] == 0, -100)


@EVERY_HEAD
def test_outputs(head, tno_type, causal):
    model = seeded(head, tiny_config(tno_type, causal))
    outputs = model(**batch(), labels=labels_for(model), output_hidden_states=True)
    as_tuple = model(**batch(), labels=labels_for(model), output_hidden_states=True, return_dict=False)
    assert torch.equal(as_tuple[0], outputs.loss) and torch.equal(as_tuple[1], outputs.logits)
    assert len(outputs.hidden_states) == model.config.num_hidden_layers + 1
    assert all(hidden.shape == (3, 19, 32) for hidden in outputs.hidden_states)
    base = model.model(**batch()).last_hidden_state
    assert torch.equal(outputs.hidden_states[-1], base)
    size = 2 if head is TnnForSequenceClassification else 99
    assert outputs.logits.shape[-1] == size
    assert outputs.loss.ndim == 0 and outputs.loss.isfinite()


@EVERY_HEAD
def test_return_dict_of_the_configuration(head, tno_type, causal):
    model = seeded(head, tiny_config(tno_type, causal))
    expected = model(**batch()).logits
    model.config.return_dict = False
    assert torch.equal(model(**batch())[0], expected)


@pytest.mark.parametrize("initializer", ["torch", "normal"])
@pytest.mark.parametrize("norm_position", ["pre", "post"])
def test_padding_tokens_in_the_loss_have_ordinary_gradients(initializer, norm_position):
    """The last padding token on the left predicts the first real one."""
    config = tiny_config(initializer=initializer, norm_position=norm_position, hidden_dropout_prob=0.0)
    model = seeded(TnnForCausalLM, config)
    input_ids = torch.cat([torch.full((2, 5), config.pad_token_id), batch(rows=2)["input_ids"]], dim=1)
    mask = (torch.arange(24) >= 5).long().expand(2, -1)
    labels = input_ids.masked_fill(mask == 0, -100)
    model(input_ids, attention_mask=mask, labels=labels).loss.backward()
    assert torch.nn.utils.get_total_norm(parameter.grad for parameter in model.parameters()) < 100


@EVERY_HEAD
def test_every_parameter_gets_a_gradient(head, tno_type, causal):
    model = seeded(head, tiny_config(tno_type, causal, norm_type="gatedrmsnorm", gtu_norm=True, learnable_decay=True))
    model.train()
    model(**batch(), labels=labels_for(model)).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name


@EVERY_HEAD
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(head, tno_type, causal, reentrant):
    model = seeded(head, tiny_config(tno_type, causal, hidden_dropout_prob=0.0)).train()
    model(**batch(), labels=labels_for(model)).loss.backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    checkpoint_activations(model, {"use_reentrant": reentrant})
    assert all(layer.gradient_checkpointing for layer in model.base_model.layers)
    model(**batch(), labels=labels_for(model)).loss.backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert relative_error(parameter.grad, gradient) < 1e-5


@pytest.mark.parametrize(
    "problem, num_labels, labels",
    [
        ("single_label_classification", 3, torch.tensor([0, 2, 1])),
        ("regression", 1, torch.tensor([0.5, -1.0, 2.0])),
        ("regression", 2, torch.randn(3, 2)),
        ("multi_label_classification", 3, torch.tensor([[1.0, 0, 1], [0, 0, 1], [1, 1, 0]])),
        (None, 3, torch.tensor([0, 2, 1])),
        (None, 1, torch.tensor([0.5, -1.0, 2.0])),
        (None, 3, torch.tensor([[1.0, 0, 1], [0, 0, 1], [1, 1, 0]])),
    ],
)
def test_classification_losses(problem, num_labels, labels):
    config = tiny_config(causal=False, num_labels=num_labels, problem_type=problem)
    outputs = seeded(TnnForSequenceClassification, config)(**batch(), labels=labels)
    if labels.dtype == torch.long:
        expected = torch.nn.functional.cross_entropy(outputs.logits, labels)
    elif problem == "multi_label_classification" or (problem is None and num_labels > 1):
        expected = torch.nn.functional.binary_cross_entropy_with_logits(outputs.logits, labels)
    else:
        expected = torch.nn.functional.mse_loss(outputs.logits.squeeze(), labels.squeeze())
    torch.testing.assert_close(outputs.loss, expected)


@pytest.mark.parametrize("causal", [True, False])
def test_pooling(causal):
    """The mean of the real tokens when bidirectional, the last of them when causal."""
    model = seeded(TnnForSequenceClassification, tiny_config(causal=causal))
    inputs = batch()
    hidden = model.model(**inputs).last_hidden_state
    for row, length in enumerate(inputs["attention_mask"].sum(1).tolist()):
        pooled = hidden[row, length - 1] if causal else hidden[row, :length].mean(0)
        torch.testing.assert_close(model(**inputs).logits[row], model.classifier(pooled))


def test_number_of_items_normalises_the_loss():
    """Trainer passes the number of items for gradient accumulation."""
    model = seeded(TnnForCausalLM, tiny_config())
    labels = labels_for(model)
    whole = model(**batch(), labels=labels).loss
    count = (labels[:, 1:] != -100).sum()
    assert model(**batch(), labels=labels, num_items_in_batch=2 * count).loss.item() == pytest.approx(whole.item() / 2)


def test_label_smoothing_of_trainer(tmp_path):
    """The loss of a causal model is that of the next tokens, smoothed or not; padding has no part in it."""
    model = seeded(TnnForCausalLM, tiny_config())
    trainer = Trainer(model, TrainingArguments(tmp_path, label_smoothing_factor=0.2, use_cpu=True, report_to="none"))
    labels = labels_for(model)
    loss = trainer.compute_loss(model, batch() | {"labels": labels.clone()})
    scores = model(**batch()).logits[:, :-1].log_softmax(dim=-1)
    real, targets = labels[:, 1:] != -100, labels[:, 1:].clamp(min=0)
    likelihood = scores.gather(-1, targets[..., None])[..., 0][real].mean()
    torch.testing.assert_close(loss, -0.8 * likelihood - 0.2 * scores[real].mean())


@EVERY_HEAD
def test_inputs_embeds(head, tno_type, causal):
    model = seeded(head, tiny_config(tno_type, causal))
    inputs = batch()
    embeds = model.get_input_embeddings()(inputs["input_ids"])
    with_embeds = model(inputs_embeds=embeds, attention_mask=inputs["attention_mask"]).logits
    assert torch.equal(with_embeds, model(**inputs).logits)


@pytest.mark.parametrize("kept", [1, 5, torch.tensor([0, 7])], ids=["one", "five", "chosen"])
def test_logits_to_keep(kept):
    model = seeded(TnnForCausalLM, tiny_config())
    positions = slice(-kept, None) if isinstance(kept, int) else kept
    every = model(**batch()).logits
    torch.testing.assert_close(model(**batch(), logits_to_keep=kept).logits, every[:, positions])


@pytest.mark.parametrize("head, tno_type, causal", LANGUAGE_MODELS)
@pytest.mark.parametrize("tied", [True, False])
def test_resize_token_embeddings(head, tno_type, causal, tied):
    model = seeded(head, tiny_config(tno_type, causal, tie_word_embeddings=tied))
    before = model(**batch()).logits
    model.resize_token_embeddings(120)
    after = model(**batch()).logits
    assert after.shape[-1] == model.config.vocab_size == 120
    torch.testing.assert_close(after[..., :99], before)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    model(torch.tensor([[119]]))


@EVERY_HEAD
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(head, tno_type, causal, dtype):
    """A model in half precision, and autocast, stay close to float32, on 200 tokens."""
    model = seeded(head, tiny_config(tno_type, causal))
    with torch.no_grad():
        exact = model(**batch(200)).logits
        with torch.autocast("cpu", dtype):
            autocast = model(**batch(200)).logits
        poles = {name: value for name, value in model.state_dict().items() if name.endswith(("log_rate", "angle"))}
        half = model.to(dtype)
        for name, value in poles.items():  # from_pretrained keeps them in float32
            half.get_parameter(name).data = value
        half = half(**batch(200)).logits
    assert half.dtype == dtype
    tolerance = 0.05 if dtype == torch.bfloat16 else 0.01
    for actual in (autocast, half):
        assert actual.isfinite().all()
        assert relative_error(actual, exact) < tolerance


@pytest.mark.parametrize("norm_type", NORMS)
def test_half_precision_of_every_norm(norm_type):
    model = seeded(TnnForCausalLM, tiny_config(norm_type=norm_type, gtu_norm=True))
    exact = model(**batch()).logits
    half = model.to(torch.bfloat16)(**batch()).logits
    assert relative_error(half, exact) < 0.05


@EVERY_HEAD
def test_training_under_autocast(head, tno_type, causal):
    model = seeded(head, tiny_config(tno_type, causal)).train()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(**batch(), labels=labels_for(model)).loss
    loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    assert all(parameter.grad.dtype == torch.float32 for parameter in model.parameters())


@pytest.mark.parametrize("head, tno_type, causal", few(("rtf", True), ("fd", True), ("rpe", False)))
def test_export(head, tno_type, causal):
    model = seeded(head, tiny_config(tno_type, causal, use_cache=False))
    inputs = batch()
    program = torch.export.export(model, (), inputs, strict=False)
    torch.testing.assert_close(program.module()(**inputs).logits, model(**inputs).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("head, tno_type, causal", few(("rpe", True)))
def test_compiled_graph_serves_all_lengths(head, tno_type, causal):
    """More lengths than there may be graphs."""
    torch.compiler.reset()
    model = seeded(head, tiny_config(tno_type, causal, use_cache=False))
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for length in range(5, 55, 5):
        inputs = {"input_ids": batch(length)["input_ids"]}
        torch.testing.assert_close(compiled(**inputs).logits, model(**inputs).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("head, tno_type, causal", few(("rtf", True), ("ski", False)))
def test_compile(head, tno_type, causal):
    """The whole forward pass is one graph, with and without a mask."""
    model = seeded(head, tiny_config(tno_type, causal, use_cache=False))
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for inputs in (batch(), {"input_ids": batch()["input_ids"]}):
        torch.testing.assert_close(compiled(**inputs).logits, model(**inputs).logits, rtol=1e-4, atol=1e-5)


def test_compile_with_inductor():
    model = seeded(TnnForCausalLM, tiny_config(use_cache=False))
    compiled = torch.compile(model)
    torch.testing.assert_close(compiled(**batch()).logits, model(**batch()).logits, rtol=1e-4, atol=1e-5)


@EVERY_HEAD
def test_copies(head, tno_type, causal):
    model = seeded(head, tiny_config(tno_type, causal))
    expected = model(**batch()).logits
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(**batch()).logits, expected)


def test_lengths_have_no_maximum(variant):
    """One token, and three times the trained length."""
    model = seeded(TnnModel, tiny_config(*variant))
    for length in (1, 3 * model.config.max_position_embeddings + 1):
        assert model(**batch(length)).last_hidden_state.isfinite().all()


@pytest.mark.parametrize(
    "initializer, deviation", [("torch", 32**-0.5), ("normal", 0.05), ("small_embeddings", 32**-0.75)]
)
def test_initialisation(initializer, deviation):
    config = tiny_config("rpe", False, initializer=initializer, initializer_range=0.05, vocab_size=5000)
    model = seeded(TnnForMaskedLM, config)
    embeddings, linear = model.model.embed_tokens.weight, model.model.layers[0].mixer.u_proj
    assert embeddings.std().item() == pytest.approx(deviation, rel=0.02)
    bound = 32**-0.5
    assert not model.lm_head.bias.any()
    if initializer == "normal":
        assert linear.weight.std().item() == pytest.approx(0.05, rel=0.1) and linear.bias.abs().max() == 0
    else:
        assert bound * 0.95 < linear.weight.abs().max() <= bound and linear.bias.abs().max() > 0


# Of commit 1c5047e: the first three embeddings, and weights of the last output projection.
FIRST_WEIGHTS = {
    "torch": [-0.041459, -0.208515, 0.190742, 0.019053, 0.039766, 0.096523],
    "normal": [-0.004749, 0.007069, -0.04192, 0.016341, -0.00146, 0.001901],
    "normal_gtu": [-0.041459, -0.208515, 0.190742, -0.026095, -0.025496, 0.000718],
}


@pytest.mark.parametrize("initializer", FIRST_WEIGHTS)
def test_equal_seeds_give_the_weights_of_earlier_versions(initializer):
    model = seeded(TnnForCausalLM, tiny_config(initializer=initializer)).model
    found = [*model.embed_tokens.weight[0, :3].tolist(), *model.layers[1].mixer.o_proj.weight[0, :3].tolist()]
    assert found == pytest.approx(FIRST_WEIGHTS[initializer], abs=1e-6)


@pytest.mark.parametrize("tied", [True, False])
def test_a_new_language_model_prefers_no_word(variant, tied):
    """With embeddings of width 1, tied, the token just read is preferred: ln V + 2 here, more in wider models."""
    fields = {"hidden_size": 64, "vocab_size": 1000, "scale_embedding": True, "tie_word_embeddings": tied}
    text = torch.randint(1000, (2, 64), generator=torch.Generator().manual_seed(0))
    head = TnnForCausalLM if variant[1] else TnnForMaskedLM
    model = seeded(head, tiny_config(*variant, initializer="small_embeddings", **fields))
    assert model(input_ids=text, labels=text.roll(-1, 1)).loss.item() == pytest.approx(math.log(1000), abs=0.3)


def test_initialisation_is_reproducible(variant):
    first, second = (seeded(TnnModel, tiny_config(*variant, learnable_decay=True)) for _ in range(2))
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)


def test_dropout_is_applied_in_training_only():
    model = seeded(TnnModel, tiny_config(hidden_dropout_prob=0.5))
    assert torch.equal(model(**batch())[0], model(**batch())[0])
    model.train()
    assert not torch.equal(model(**batch())[0], model(**batch())[0])
