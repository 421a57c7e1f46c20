"""The loss of a language model without the logits of the whole batch, beside the one with them."""

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.loss.loss_utils import ForCausalLMLoss, ForMaskedLMLoss
from transformers.modeling_outputs import CausalLMOutputWithPast, MaskedLMOutput

from helpers.models import RandomTexts, seeded, slow, tiny_config
from modeling_tnn import TnnForCausalLM, TnnForMaskedLM, numerics
from modeling_tnn.kernels import loss
from modeling_tnn.kernels.loss import can_skip_logits, eager_loss, linear_cross_entropy

ROWS, WORDS, SIZE = 37, 23, 11


@pytest.fixture(autouse=True)
def few_rows(monkeypatch):
    """Several pieces, the last one not full."""
    monkeypatch.setattr(loss, "CPU_ROWS", 8)
    monkeypatch.setattr(loss, "LARGE_ROWS", 8)


def head_inputs(bias: bool, dtype=torch.float64):
    torch.manual_seed(0)
    hidden, weight = torch.randn(ROWS, SIZE, dtype=dtype), torch.randn(WORDS, SIZE, dtype=dtype)
    inputs = [hidden, weight] + ([torch.randn(WORDS, dtype=dtype)] if bias else [])
    labels = torch.randint(WORDS, (ROWS,))
    labels[[0, 8, 9, 36]] = -100
    return [x.requires_grad_() for x in inputs], labels


def fused(inputs, labels, ignore_index=-100):
    hidden, weight, bias = (*inputs, None)[:3]
    return linear_cross_entropy(hidden, weight, bias, labels, ignore_index)


@pytest.mark.parametrize(("bias", "ignore_index"), [(False, -100), (True, 3)])
@pytest.mark.parametrize("hosts", [("cpu",), ()])
def test_values_and_gradients(bias, ignore_index, hosts, monkeypatch):
    """A factor, a second pass, what is frozen, derivatives of higher order, a graph; rows without a label have none.

    On an accelerator the words are padded, and rows without a label are not picked, which would be a device sync.
    """
    monkeypatch.setattr(numerics, "HOST_DEVICES", hosts)
    inputs, labels = head_inputs(bias)
    labels = labels.where(labels != -100, ignore_index)
    expected = eager_loss(*inputs, labels=labels, ignore_index=ignore_index)
    factor = torch.tensor(0.3, dtype=torch.float64)
    wanted = torch.autograd.grad(expected, inputs, factor)
    for function in (fused, torch.compile(fused, backend="eager", fullgraph=True)):
        found = function(inputs, labels, ignore_index)
        torch.testing.assert_close(found, expected)
        for _ in range(2):
            gradients = torch.autograd.grad(found, inputs, factor, retain_graph=True)
            torch.testing.assert_close(gradients, wanted)
            assert (gradients[0][labels == ignore_index] == 0).all()
    torch.autograd.gradgradcheck(lambda *given: fused(given, labels, ignore_index), inputs, fast_mode=True)
    for fixed in range(len(inputs)):
        given = [x.detach().requires_grad_(i != fixed) for i, x in enumerate(inputs)]
        fused(given, labels, ignore_index).backward()
        assert [x.grad is None for x in given] == [i == fixed for i in range(len(inputs))]


@pytest.mark.parametrize(("dtype", "autocast"), [(torch.bfloat16, True), (torch.float16, False)])
@pytest.mark.parametrize("hosts", [("cpu",), ()])
def test_half_precision(dtype, autocast, hosts, monkeypatch):
    """Nearer to float64 than twice the way with all logits, with autocast and for a model of that type."""
    monkeypatch.setattr(numerics, "HOST_DEVICES", hosts)
    exact, labels = head_inputs(bias=True)
    eager_loss(*exact, labels=labels).backward()
    errors = {}
    for name, function in {"fused": fused, "eager": lambda x, y: eager_loss(*x, labels=y)}.items():
        inputs = [x.detach().to(torch.float32 if autocast else dtype).requires_grad_() for x in exact]
        with torch.autocast("cpu", dtype, enabled=autocast):
            value = function(inputs, labels)
        assert value.dtype == torch.float32
        value.backward()
        assert [x.grad.dtype for x in inputs] == [x.dtype for x in inputs]
        errors[name] = [(x.grad.double() - y.grad).norm() / y.grad.norm() for x, y in zip(inputs, exact, strict=True)]
    assert all(ours <= 2 * theirs for ours, theirs in zip(errors["fused"], errors["eager"], strict=True))


def model_and_batch(causal: bool, **fields):
    model = seeded(
        TnnForCausalLM if causal else TnnForMaskedLM, tiny_config(causal=causal, hidden_dropout_prob=0.0, **fields)
    ).train()
    ids = torch.randint(99, (3, 13), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[1, 4:] = -100
    return model, {"input_ids": ids, "labels": labels}


@pytest.mark.parametrize(
    "causal, tie, items", [(True, True, None), (True, False, torch.tensor(5)), (False, True, 5), (False, False, None)]
)
def test_a_model_in_training(causal, tie, items):
    """The loss and every gradient are those of the way with logits; the logits are given when asked for."""
    model, batch = model_and_batch(causal, tie_word_embeddings=tie)
    gradients, losses = [], []
    for skip in (True, False):
        outputs = model(**batch, num_items_in_batch=items, skip_logits=skip)
        assert (outputs.logits is None) is skip
        model.zero_grad()
        outputs.loss.backward()
        losses.append(outputs.loss)
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*gradients)


def test_logits_in_evaluation():
    """As for the models of transformers, unless they are refused; labels may be shifted before."""
    model, batch = model_and_batch(causal=True)
    shifted = nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=7)
    losses = [model(batch["input_ids"], shift_labels=shifted, skip_logits=skip).loss for skip in (True, False)]
    torch.testing.assert_close(*losses)
    with_logits, without = model.eval()(**batch), model(**batch, skip_logits=True)
    assert with_logits.logits.shape == (3, 13, 99) and without.logits is None
    torch.testing.assert_close(with_logits.loss, without.loss)
    with pytest.raises(ValueError, match="`labels` must be given with skip_logits=True, got None"):
        model(batch["input_ids"], skip_logits=True)


def largest_tensor(function) -> int:
    """The largest number of elements of a tensor that `function` saves or makes."""
    with torch.profiler.profile(profile_memory=True) as profile:
        function()
    return max(event.self_cpu_memory_usage for event in profile.events()) // 4


def test_no_tensor_has_the_size_of_the_logits():
    model, batch = model_and_batch(causal=True, vocab_size=5000, hidden_size=8)
    logits = 3 * 13 * 5000
    assert largest_tensor(lambda: model(**batch).loss.backward()) >= logits
    assert largest_tensor(lambda: model(**batch, skip_logits=True).loss.backward()) < logits / 2
    model.config.skip_logits = True
    assert largest_tensor(lambda: model(**batch, num_items_in_batch=5).loss.backward()) < logits / 2


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def replaced_forward(model):
    forward = model.lm_head.forward
    model.lm_head.forward = lambda x: 2 * forward(x)


CHANGES = {
    "hook": lambda model: model.lm_head.register_forward_hook(lambda module, inputs, output: output * 2),
    "loss of the user": lambda model: setattr(model, "loss_function", lambda *x, **y: 2 * ForCausalLMLoss(*x, **y)),
    "loss without a shift": lambda model: setattr(model, "loss_function", ForMaskedLMLoss),
    "replaced forward": replaced_forward,
    "adapter": lambda model: setattr(model.lm_head, "__class__", Doubled),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_head_or_loss_takes_part(name):
    """A head with a hook, a device map, an adapter or another loss goes the way with logits, as `eager` does."""
    assert not can_skip_logits(model_and_batch(causal=True, tno_implementation="eager")[0])
    model, batch = model_and_batch(causal=True)
    assert can_skip_logits(model)
    before = model(**batch, skip_logits=True).loss.item()
    CHANGES[name](model)
    assert not can_skip_logits(model)
    found = model(**batch, skip_logits=True)
    assert found.logits is None and found.loss.item() != pytest.approx(before)
    torch.testing.assert_close(found.loss, model(**batch, skip_logits=False).loss)


@pytest.mark.parametrize("causal, items", [(True, None), (False, 5)])
def test_logits_in_training(causal, items, tmp_path):
    """Those of transformers' models, unless the configuration or the call skips them. The field is not saved."""
    model, batch = model_and_batch(causal)
    cls, expected = CausalLMOutputWithPast if causal else MaskedLMOutput, model(batch["input_ids"]).logits
    for skipped, options in ((False, {}), (True, {}), (True, {"skip_logits": False}), (False, {"skip_logits": True})):
        model.config.skip_logits = skipped
        outputs = model.train()(**batch, num_items_in_batch=items, **options)
        assert type(outputs) is cls
        if options.get("skip_logits", skipped):
            assert outputs.logits is None and "logits" not in outputs
        else:
            torch.testing.assert_close(outputs["logits"], expected, rtol=0, atol=0)
    model.config.skip_logits = True
    for given in (model(batch["input_ids"]), model.eval()(**batch), model(batch["input_ids"])):
        torch.testing.assert_close(given.logits, expected, rtol=0, atol=0)
    model.save_pretrained(tmp_path)
    assert not type(model).from_pretrained(tmp_path).config.skip_logits
    assert type(model).from_pretrained(tmp_path, skip_logits=True).train()(**batch).logits is None


def own_loss(outputs, labels, num_items_in_batch):
    return ForCausalLMLoss(outputs["logits"], labels, vocab_size=99, num_items_in_batch=num_items_in_batch)


def test_trainer(tmp_path):
    """Without logits in training it learns as with them, and evaluates them; losses of its own get logits."""
    options = {"max_steps": 3, "report_to": "none", "use_cpu": True, "bf16": True, "learning_rate": 1e-2}
    trained, metrics = [], {"compute_metrics": lambda found: {"words": found.predictions.shape[2]}}
    for skipped, smoothing, given in (
        (False, 0, {}),
        (True, 0, {}),
        (True, 0, {"compute_loss_func": own_loss}),
        (True, 0.1, {}),
    ):
        arguments = TrainingArguments(str(tmp_path), label_smoothing_factor=smoothing, **options)
        model = model_and_batch(True)[0]
        model.config.skip_logits = skipped
        trainer = Trainer(
            model, arguments, train_dataset=RandomTexts(), eval_dataset=RandomTexts(), **metrics, **given
        )
        trained.append(trainer.train().training_loss)
        assert trainer.evaluate()["eval_words"] == 99
    assert trained == pytest.approx(trained[:1] * 4, rel=0.1) and trained[:3] == pytest.approx(
        trained[:1] * 3, abs=1e-2
    )


def test_a_batch_without_labels_is_nan_as_in_transformers():
    model, batch = model_and_batch(causal=True)
    batch["labels"][:] = -100
    assert model(**batch).loss.isnan() and model(**batch, skip_logits=True).loss.isnan()
    summed = model(**batch, num_items_in_batch=1, skip_logits=True).loss
    summed.backward()
    assert summed == 0 and all((p.grad == 0).all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("causal, hosts", slow((True, ()), (False, ("cpu",))))
def test_compiled(causal, hosts, monkeypatch):
    """One graph, with logits in rows that an accelerator reads aligned, and the gradients of the uncompiled model."""
    model, batch = model_and_batch(causal)
    model.config.use_cache = False  # PyTorch 2.11 cannot return a cache that a graph has made
    model(**batch).loss.backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    monkeypatch.setattr(numerics, "HOST_DEVICES", hosts)
    model.zero_grad()
    torch._dynamo.reset()
    outputs = torch.compile(model, backend="eager", fullgraph=True)(**batch)
    assert outputs.logits.shape == (3, 13, 99) and outputs.logits.stride(1) == (99 if hosts else 128)
    outputs.loss.backward()
    torch.testing.assert_close({name: p.grad for name, p in model.named_parameters()}, expected)
    model.config.skip_logits = True
    alone = torch.compile(model, backend="eager", fullgraph=True)(**batch)
    assert alone.logits is None and alone.loss == outputs.loss
