"""Packed rows: outputs and gradients of a document do not depend on the other documents in the row."""

import pytest
import torch
from datasets import Dataset
from transformers import DataCollatorWithFlattening, DefaultDataCollator, Trainer, TrainingArguments

from helpers.models import BIDIRECTIONAL, CAUSAL, checkpoint_activations, relative_error, seeded, tiny_config
from modeling_tnn import TnnForCausalLM, TnnForMaskedLM, TnnForSequenceClassification, TnnModel
from modeling_tnn.packing import split_packed

LENGTHS = (1, 7, 17, 2, 40, 9, 3)
HEADS = [(TnnForCausalLM, t, True) for t in CAUSAL] + [(TnnForMaskedLM, t, False) for t in BIDIRECTIONAL]


def texts(lengths=LENGTHS) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(99, (length,), generator=generator) for length in lengths]


def flattened(lengths=LENGTHS, **options) -> dict[str, torch.Tensor]:
    collator = DataCollatorWithFlattening(return_tensors="pt", **options)
    return collator([{"input_ids": text.tolist()} for text in texts(lengths)])


WAYS = {
    "position_ids": {},
    "seq_idx": {"return_position_ids": False, "return_seq_idx": True},
    "offsets": {"return_position_ids": False, "return_flash_attn_kwargs": True},
    "all": {"return_seq_idx": True, "return_flash_attn_kwargs": True},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("head, tno_type, causal", HEADS)
def test_packed_is_one_by_one(head, tno_type, causal, way):
    model = seeded(head, tiny_config(tno_type, causal, norm_position="pre" if causal else "post"))
    batch = flattened(**WAYS[way])
    with torch.no_grad():
        packed = model(**batch, output_hidden_states=True)
        alone = [model(text[None], output_hidden_states=True) for text in texts()]
    assert relative_error(packed.logits, torch.cat([a.logits for a in alone], dim=1)) < 5e-6
    for layer, hidden in enumerate(packed.hidden_states):
        assert relative_error(hidden, torch.cat([a.hidden_states[layer] for a in alone], dim=1)) < 5e-6
    merged = model(batch["input_ids"]).logits
    assert relative_error(merged, packed.logits) > 1e-3, "the test sees no leak"


@pytest.mark.parametrize("head, tno_type, causal", HEADS)
def test_no_gradient_crosses_a_boundary(head, tno_type, causal):
    """The outputs of each document depend on its own embeddings, all of them, and on no other."""
    model = seeded(head, tiny_config(tno_type, causal))
    batch = flattened()
    embeds = model.get_input_embeddings()(batch["input_ids"]).detach().requires_grad_()
    logits = model(inputs_embeds=embeds, position_ids=batch["position_ids"]).logits
    start = 0
    for length in LENGTHS:
        own = torch.arange(sum(LENGTHS))
        own = (own >= start) & (own < start + length)
        (gradient,) = torch.autograd.grad(logits[0, own].square().sum(), embeds, retain_graph=True)
        assert gradient[0, ~own].abs().max() == 0
        assert gradient[0, own].abs().amax(dim=1).min() > 0
        start += length


@pytest.mark.parametrize("causal", [True, False])
def test_gradients_of_parameters(causal):
    """The gradients of the loss on packed rows are those on the padded batch."""
    head = TnnForCausalLM if causal else TnnForMaskedLM
    model = seeded(head, tiny_config(causal=causal)).double()
    batch = flattened()
    model(**batch).loss.backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    padded = torch.nn.utils.rnn.pad_sequence(texts(), batch_first=True)
    real = torch.arange(padded.shape[1]) < torch.tensor(LENGTHS)[:, None]
    labels = padded.masked_fill(~real, -100)
    labels[:, 0] = -100
    model(padded, attention_mask=real.long(), labels=labels).loss.backward()
    for name, parameter in model.named_parameters():
        assert relative_error(parameter.grad, expected[name]) < 1e-9, name


def test_rows_of_several_documents_with_padding():
    """Two rows that differ in their documents; padding between and behind them."""
    model = seeded(TnnModel, tiny_config(causal=False))
    ids = torch.randint(99, (2, 12))
    position_ids = torch.tensor([[4, 5, 6, 0, 1, 0, 1, 2, 0, 0, 0, 0], [0, 0, 0, 1, 2, 3, 4, 0, 0, 0, 1, 2]])
    mask = torch.tensor([[1] * 8 + [0] * 4, [0, 0, 1, 1, 1, 1, 1, 0, 0, 1, 1, 1]])
    hidden = model(ids, attention_mask=mask, position_ids=position_ids).last_hidden_state
    for row, start, end in ((0, 0, 3), (0, 3, 5), (0, 5, 8), (1, 2, 7), (1, 9, 12)):
        alone = model(ids[row : row + 1, start:end]).last_hidden_state[0]
        assert relative_error(hidden[row, start:end], alone) < 5e-6


@pytest.mark.parametrize(
    "position_ids, mask",
    [
        (torch.arange(12)[None], None),
        (torch.arange(12)[None] + 30, None),
        (torch.arange(12).expand(2, -1), torch.ones(2, 12)),
        (torch.tensor([[0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8]]), torch.tensor([[0] * 3 + [1] * 9, [0] * 3 + [1] * 9])),
        (torch.tensor([[1, 1, 0, 1, 2, 3, 4, 5, 6, 7, 1, 1]]), torch.tensor([[0] * 2 + [1] * 8 + [0] * 2] * 2)),
    ],
    ids=["eager", "offset", "of each row", "left padding", "both sides"],
)
def test_ordinary_positions_mean_nothing(position_ids, mask):
    ids = torch.randint(99, (2, 12))
    assert split_packed(ids, mask, position_ids) is None
    model = seeded(TnnForCausalLM, tiny_config())
    assert torch.equal(
        model(ids, attention_mask=mask, position_ids=position_ids).logits, model(ids, attention_mask=mask).logits
    )


def test_padding_is_less_than_half():
    documents = split_packed(
        torch.zeros(1, 700), position_ids=torch.cat([torch.arange(n) for n in (600, *[2] * 50)])[None]
    )
    assert sum(batch.real.numel() for batch in documents) < 2 * 700
    assert sum(batch.real.sum() for batch in documents) == 700


def test_training_with_dropout_and_checkpointing():
    model = seeded(TnnForCausalLM, tiny_config()).train()
    checkpoint_activations(model)
    model(**flattened()).loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("head, causal", [(TnnForCausalLM, True), (TnnForMaskedLM, False)])
def test_trainer(head, causal, tmp_path):
    """With the collator, and with rows that were packed before: Trainer must not drop their positions."""
    packed = {name: values[0].tolist() for name, values in flattened().items()}
    losses = []
    for rows, collator in (
        ([{"input_ids": text.tolist()} for text in texts()], DataCollatorWithFlattening()),
        ([packed], DefaultDataCollator()),
    ):
        args = TrainingArguments(str(tmp_path), max_steps=1, per_device_train_batch_size=len(rows), report_to="none",
                                 train_sampling_strategy="sequential", use_cpu=True, disable_tqdm=True)  # fmt: skip
        model = seeded(head, tiny_config(causal=causal, hidden_dropout_prob=0.0))
        trainer = Trainer(model, args, train_dataset=Dataset.from_list(rows), data_collator=collator)
        losses.append(trainer.train().training_loss)
    expected = seeded(head, model.config)(**flattened()).loss.item()
    assert losses == pytest.approx([expected, expected])


def test_tuples():
    model, batch = seeded(TnnModel, tiny_config()), flattened()
    expected = model(batch["input_ids"], position_ids=batch["position_ids"]).last_hidden_state
    (output,) = model(batch["input_ids"], position_ids=batch["position_ids"], return_dict=False)
    assert torch.equal(output, expected)


IDS = torch.zeros(1, 4, dtype=torch.long)
RESTART = torch.tensor([[0, 1, 0, 1]])


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"position_ids": RESTART, "use_cache": True}, "Leave out past_key_values"),
        (
            {"position_ids": torch.arange(5)[None]},
            r"`position_ids` must have shape \(B, L\) = \(1, 4\) or \(1, L\), got \(1, 5\)",
        ),
        ({"position_ids": torch.zeros(3, 1, 4).long()}, r"`position_ids` must have shape .*, got \(3, 1, 4\)"),
        ({"seq_idx": torch.zeros(2, 4).long()}, r"`seq_idx` must have shape .*, got \(2, 4\)"),
        ({"cu_seq_lens_q": torch.tensor([0, 2, 5])}, r"`cu_seq_lens_q` must grow from 0 .* = 4, got \[0, 2, 5\]"),
        ({"cu_seq_lens_q": torch.tensor([0, 2, 2, 4])}, "must grow"),
        (
            {"position_ids": RESTART, "attention_mask": torch.ones(1, 3)},
            r"`attention_mask` must have shape .*, got \(1, 3\)",
        ),
    ],
)
def test_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        seeded(TnnForCausalLM, tiny_config())(IDS, **arguments)


def test_a_cache_continues_one_text():
    model = seeded(TnnForCausalLM, tiny_config())
    cache = model(IDS, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="must be one document when a cache is used, got several"):
        model(IDS, past_key_values=cache, position_ids=RESTART)
    following = model(IDS, past_key_values=cache, position_ids=torch.arange(4, 8)[None]).logits
    assert relative_error(following, model(IDS.repeat(1, 2)).logits[:, 4:]) < 5e-6


@pytest.mark.parametrize("causal", [True, False])
def test_one_class_for_a_row(causal):
    model = seeded(TnnForSequenceClassification, tiny_config(causal=causal))
    with pytest.raises(ValueError, match="must be one document for a classification, got several"):
        model(IDS, position_ids=RESTART)
    assert torch.equal(model(IDS, position_ids=torch.arange(4)[None]).logits, model(IDS).logits)
