"""Heads for tagging, question answering and multiple choice: padding, packing, losses, loading and learning."""

import pytest
import torch
from transformers import Trainer, TrainingArguments

from helpers.models import AUTO, VARIANTS, relative_error, seeded, tiny_config
from modeling_tnn import (
    TnnForMaskedLM,
    TnnForMultipleChoice,
    TnnForQuestionAnswering,
    TnnForSequenceClassification,
    TnnForTokenClassification,
)

EVERY_VARIANT = pytest.mark.parametrize("tno_type, causal", VARIANTS)
LENGTHS = (5, 9)


def texts(seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 99, (length,), generator=generator) for length in LENGTHS]


def padded(rows: list[torch.Tensor], left: bool = False) -> dict[str, torch.Tensor]:
    """The rows with three more places than the longest, filled with a token that means something."""
    length = max(map(len, rows)) + 3
    ids, mask = torch.full((len(rows), length), 7), torch.zeros(len(rows), length, dtype=torch.long)
    for index, row in enumerate(rows):
        place = slice(length - len(row), None) if left else slice(len(row))
        ids[index, place], mask[index, place] = row, 1
    return {"input_ids": ids, "attention_mask": mask}


def build(head, tno_type="rpe", causal=False, **fields):
    return seeded(head, tiny_config(tno_type, causal, **fields)).double().eval()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("head", [TnnForSequenceClassification, TnnForQuestionAnswering, TnnForMultipleChoice])
def test_a_head_on_another_device(head, causal):
    """`device_map` may put the last layers elsewhere than the inputs; a CPU alone has the meta device for that."""
    model = build(head, causal=causal)
    model.model.register_forward_hook(lambda module, args, outputs: to_meta(outputs))
    (model.qa_outputs if head is TnnForQuestionAnswering else model.classifier).to("meta")
    given = padded(texts())
    if head is TnnForMultipleChoice:
        given = {name: value[:, None] for name, value in given.items()}
    outputs = model(**given)
    assert (outputs.start_logits if head is TnnForQuestionAnswering else outputs.logits).is_meta


def to_meta(outputs):
    outputs.last_hidden_state = outputs.last_hidden_state.to("meta")
    return outputs


@EVERY_VARIANT
@pytest.mark.parametrize("left", [False, True])
def test_tags_do_not_depend_on_padding(tno_type, causal, left):
    model, rows = build(TnnForTokenClassification, tno_type, causal, num_labels=4), texts()
    given = padded(rows, left)
    labels = torch.where(given["attention_mask"] == 1, given["input_ids"] % 4, -100)
    outputs = model(**given, labels=labels)
    alone = [model(row[None], labels=row[None] % 4) for row in rows]
    for logits, mask, one in zip(outputs.logits, given["attention_mask"], alone, strict=True):
        assert relative_error(logits[mask == 1], one.logits[0]) < 1e-11
    total = sum(one.loss * len(row) for one, row in zip(alone, rows, strict=True))
    assert outputs.loss.item() == pytest.approx(total.item() / sum(LENGTHS), rel=1e-6)
    divided = model(**given, labels=labels, num_items_in_batch=torch.tensor(28)).loss
    assert divided.item() == pytest.approx(total.item() / 28, rel=1e-6)


def test_tags_of_packed_rows():
    model, rows = build(TnnForTokenClassification, num_labels=4), texts()
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    logits = model(torch.cat(rows)[None], position_ids=positions[None]).logits[0]
    expected = torch.cat([model(row[None]).logits[0] for row in rows])
    assert relative_error(logits, expected) < 1e-11


@EVERY_VARIANT
@pytest.mark.parametrize("left", [False, True])
def test_spans_do_not_depend_on_padding(tno_type, causal, left):
    """Neither their logits nor their loss. A place outside the text is ignored."""
    model, rows = build(TnnForQuestionAnswering, tno_type, causal), texts()
    given = padded(rows, left)
    offsets = torch.tensor([given["input_ids"].shape[1] - length if left else 0 for length in LENGTHS])
    spans = {"start_positions": torch.tensor([1, 3]), "end_positions": torch.tensor([2, 8])}
    outputs = model(**given, **{name: place + offsets for name, place in spans.items()})
    alone = [model(row[None], **{n: place[[i]] for n, place in spans.items()}) for i, row in enumerate(rows)]
    for index, one in enumerate(alone):
        real = given["attention_mask"][index] == 1
        for name in ("start_logits", "end_logits"):
            assert relative_error(outputs[name][index][real], one[name][0]) < 1e-11
            assert (outputs[name][index][~real] == torch.finfo(torch.float64).min).all()
    assert outputs.loss.item() == pytest.approx(sum(one.loss.item() for one in alone) / 2, rel=1e-6)
    outside = torch.tensor([1, 99])
    first = model(rows[0][None], start_positions=outside[:1], end_positions=outside[:1]).loss
    both = model(torch.stack([rows[0]] * 2), start_positions=outside, end_positions=outside).loss
    assert both.item() == pytest.approx(first.item(), rel=1e-6)


@EVERY_VARIANT
def test_choices_are_scored_alone(tno_type, causal):
    """As by a classifier with one label and the same weights."""
    model = build(TnnForMultipleChoice, tno_type, causal)
    classifier = build(TnnForSequenceClassification, tno_type, causal, num_labels=1)
    classifier.load_state_dict(model.state_dict())
    given = [padded(texts(seed)) for seed in range(3)]
    together = {name: torch.stack([one[name] for one in given], dim=1) for name in given[0]}  # (B, C, L)
    labels = torch.tensor([2, 0])
    outputs = model(**together, labels=labels)
    expected = torch.cat([classifier(**one).logits for one in given], dim=1)
    assert relative_error(outputs.logits, expected) < 1e-11
    loss = torch.nn.functional.cross_entropy(expected, labels)
    assert outputs.loss.item() == pytest.approx(loss.item(), rel=1e-6)
    embedded = {"inputs_embeds": model.get_input_embeddings()(together.pop("input_ids")), **together}
    assert relative_error(model(**embedded).logits, expected) < 1e-11
    if causal:  # the last token that is not padding
        model.config.pad_token_id = 7
        rows = torch.stack([one["input_ids"] for one in given], dim=1)
        unmasked = model(rows, attention_mask=(rows != 7).long())
        assert relative_error(model(rows).logits, unmasked.logits) < 1e-11


@pytest.mark.parametrize("head", [TnnForTokenClassification, TnnForQuestionAnswering, TnnForMultipleChoice])
def test_saved_and_loaded(head, tmp_path):
    """Alone, on the body of a masked language model, and as the body of another head."""
    model = seeded(head, tiny_config(causal=False, num_labels=3))
    model.save_pretrained(tmp_path / "head")
    again = AUTO[head].from_pretrained(tmp_path / "head")
    assert type(again) is head
    assert all(torch.equal(again.state_dict()[name], weight) for name, weight in model.state_dict().items())
    other = TnnForTokenClassification.from_pretrained(tmp_path / "head")
    assert all(torch.equal(other.model.state_dict()[n], weight) for n, weight in model.model.state_dict().items())
    body = seeded(TnnForMaskedLM, tiny_config(causal=False))
    body.save_pretrained(tmp_path / "body")
    tuned = AUTO[head].from_pretrained(tmp_path / "body")
    assert all(torch.equal(tuned.model.state_dict()[n], weight) for n, weight in body.model.state_dict().items())


CHOICES = torch.full((2, 3, 4), 5)
IDS = torch.full((2, 4), 5)
WRONG = {
    "choices without their axis": (TnnForMultipleChoice, {"input_ids": IDS}, "input_ids` must have shape .B, C, L."),
    "a mask of rows": (
        TnnForMultipleChoice,
        {"input_ids": CHOICES, "attention_mask": torch.ones(2, 4)},
        "attention_mask` must have shape .* got .8,.",
    ),
    "no choice": (
        TnnForMultipleChoice,
        {"input_ids": CHOICES, "labels": torch.tensor([0, 3])},
        r"labels` must be in \[0, .*3\), got 3",
    ),
    "no text": (TnnForMultipleChoice, {}, "input_ids` must be a tensor"),
    "packed choices": (
        TnnForMultipleChoice,
        {"input_ids": CHOICES, "position_ids": torch.tensor([[0, 1, 0, 1]] * 6)},
        "must be one document",
    ),
    "a tag too high": (
        TnnForTokenClassification,
        {"input_ids": IDS, "labels": IDS},
        r"labels` must be in \[0, num_labels=3\), got 5",
    ),
    "a tag for each row": (
        TnnForTokenClassification,
        {"input_ids": IDS, "labels": torch.tensor([0, 1])},
        r"labels` must have shape \(B, L\)",
    ),
    "a negative place": (
        TnnForQuestionAnswering,
        {"input_ids": IDS, "start_positions": torch.tensor([0, -1]), "end_positions": torch.tensor([0, 1])},
        "start_positions` must be at least 0, got -1",
    ),
    "a place as a fraction": (
        TnnForQuestionAnswering,
        {"input_ids": IDS, "start_positions": torch.tensor([0, 1]), "end_positions": torch.tensor([0.0, 1.0])},
        "end_positions` must hold torch.int64",
    ),
    "spans in packed rows": (
        TnnForQuestionAnswering,
        {"input_ids": IDS, "position_ids": torch.tensor([[0, 1, 0, 1]] * 2)},
        "must be one document",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors(name):
    head, given, message = WRONG[name]
    with pytest.raises((TypeError, ValueError), match=message):
        seeded(head, tiny_config(causal=False, num_labels=3))(**given)


def tagged(seed: int) -> dict:
    """Tokens and whether the next one is larger, which needs a look at both."""
    ids = torch.randint(3, 99, (12,), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": (ids.roll(-1) > ids).long()}


def answered(seed: int) -> dict:
    """The answer is between tokens 1 and 2."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 99, (12,), generator=generator)
    start = int(torch.randint(0, 9, (), generator=generator))
    ids[start], ids[start + 2] = 1, 2
    return {"input_ids": ids, "start_positions": start, "end_positions": start + 2}


def chosen(seed: int) -> dict:
    """The choice with the token 1."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 99, (3, 12), generator=generator)
    label = int(torch.randint(0, 3, (), generator=generator))
    ids[label, int(torch.randint(0, 12, (), generator=generator))] = 1
    return {"input_ids": ids, "labels": label}


TASKS = {TnnForTokenClassification: tagged, TnnForQuestionAnswering: answered, TnnForMultipleChoice: chosen}


@pytest.mark.slow
@pytest.mark.parametrize("head", TASKS)
def test_learns_with_trainer(head, tmp_path):
    """The loss of unseen rows falls below a half of the first."""
    rows = TASKS[head]
    model = seeded(head, tiny_config(causal=False, num_labels=2, hidden_dropout_prob=0.0))
    options = {"use_cpu": True, "disable_tqdm": True, "report_to": "none", "save_strategy": "no"}
    arguments = TrainingArguments(
        tmp_path, max_steps=150, per_device_train_batch_size=32, learning_rate=1e-2, **options
    )
    trainer = Trainer(
        model, arguments, train_dataset=[rows(i) for i in range(2000)], eval_dataset=[rows(-1 - i) for i in range(64)]
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before / 2


@pytest.mark.parametrize("head", TASKS)
def test_accumulated_steps(head, tmp_path):
    """Two batches of four are one of eight, also where they have other numbers of labels."""
    rows = [TASKS[head](seed) for seed in range(8)]
    if head is TnnForTokenClassification:
        for row in rows[:4]:
            row["labels"][3:] = -100
    weights = []
    for size in (8, 4):
        model = seeded(head, tiny_config(causal=False, num_labels=2, hidden_dropout_prob=0.0))
        arguments = TrainingArguments(
            tmp_path, max_steps=1, per_device_train_batch_size=size, gradient_accumulation_steps=8 // size,
            learning_rate=0.1, optim="sgd", max_grad_norm=0.0, use_cpu=True, disable_tqdm=True, report_to="none",
            save_strategy="no", train_sampling_strategy="sequential",
        )  # fmt: skip
        Trainer(model, arguments, train_dataset=rows).train()
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert relative_error(*weights) < 1e-6
