"""The tokenizer of DNA, reverse complements, and the mean over both strands in a plain Trainer."""

import pytest
import torch
from datasets import Dataset
from transformers import BertTokenizerFast, PreTrainedTokenizerFast, Trainer, TrainingArguments

from helpers.models import seeded, tiny_config
from modeling_tnn import (
    TnnForCausalLM,
    TnnForMaskedLM,
    TnnForQuestionAnswering,
    TnnForSequenceClassification,
    TnnForTokenClassification,
    TnnModel,
)
from modeling_tnn.data.dna import VOCABULARY, average_strands, dna_tokenizer, reverse_complement

OTHER = str.maketrans("ACGT", "TGCA")
SEQUENCES = ["A", "ACG", "GATTACANC", "TTTTTGCATGCAATT"]


def test_the_tokenizer(tmp_path):
    tokenizer = dna_tokenizer(100)
    tokenizer.save_pretrained(tmp_path)
    for one in (tokenizer, PreTrainedTokenizerFast.from_pretrained(tmp_path)):
        letters = [*range(7, 12), *range(7, 12), 10, 11, 11, 6, 6, 3, 7]
        assert one("ACGTNacgtnuRyX\n[MASK]a").input_ids == [0, *letters, 1]
        assert one("AC", "G").input_ids == [0, 7, 8, 1, 9, 1]
        assert one.decode(one("acgt").input_ids, skip_special_tokens=True) == "ACGT"
        assert one.convert_ids_to_tokens(range(12)) == list(VOCABULARY) and len(one) == 12
        assert (one.padding_side, one.model_max_length) == ("left", 100)


def test_reverse_complements():
    """Rows of other lengths, padded on either side; a masked nucleotide is masked on the other strand."""
    tokenizer = dna_tokenizer()
    masked = ["AC[MASK]GN", "NC[MASK]GT"]
    sequences = [*SEQUENCES, masked[0]]
    others = [*(sequence[::-1].translate(OTHER) for sequence in SEQUENCES), masked[1]]
    for side in ("left", "right"):
        options = {"padding": True, "padding_side": side, "return_tensors": "pt"}
        ids, expected = (tokenizer(texts, **options).input_ids for texts in (sequences, others))
        assert torch.equal(reverse_complement(ids, tokenizer), expected)
        assert torch.equal(reverse_complement(expected, tokenizer), ids)


def test_a_tokenizer_of_words_is_refused(tmp_path):
    (tmp_path / "vocab.txt").write_text("[UNK]\n[CLS]\n[SEP]\n[PAD]\nacgt\n")
    words = BertTokenizerFast(str(tmp_path / "vocab.txt"))
    with pytest.raises(ValueError, match="must have one token for each of A, C, G and T, got "):
        reverse_complement(torch.zeros(1, 3, dtype=torch.long), words)


def test_the_mean_of_both_strands(tmp_path):
    """What a Trainer evaluates inside the block is the mean of two predictions; after it, the model is as before."""
    tokenizer, model = dna_tokenizer(), seeded(TnnForSequenceClassification, tiny_config(vocab_size=12, num_labels=3))
    args = TrainingArguments(tmp_path, report_to="none", use_cpu=True, per_device_eval_batch_size=3)
    trainer = Trainer(model, args, processing_class=tokenizer)

    def data(sequences: list[str]) -> Dataset:
        return Dataset.from_list([dict(tokenizer(one)) | {"labels": len(one) % 3} for one in sequences])

    both = [SEQUENCES, [sequence[::-1].translate(OTHER) for sequence in SEQUENCES]]
    alone = [trainer.predict(data(sequences)) for sequences in both]
    with average_strands(model, tokenizer):
        mean = trainer.predict(data(SEQUENCES))
        with pytest.raises(ValueError, match="`input_ids` must be given by name"):
            model(torch.tensor([[0, 7, 1]]))
    expected = sum(torch.tensor(one.predictions) for one in alone) / 2
    assert torch.allclose(torch.tensor(mean.predictions), expected, atol=1e-6)
    assert mean.metrics["test_loss"] == pytest.approx(sum(one.metrics["test_loss"] for one in alone) / 2, rel=1e-5)
    assert not torch.allclose(expected, torch.tensor(alone[0].predictions), atol=1e-3)
    assert (trainer.predict(data(SEQUENCES)).predictions == alone[0].predictions).all()


@pytest.mark.parametrize(
    "cls", [TnnForCausalLM, TnnForMaskedLM, TnnForQuestionAnswering, TnnForTokenClassification, TnnModel]
)
def test_models_without_a_mean(cls):
    """Their outputs are of places, which differ between the strands."""
    model = seeded(cls, tiny_config(vocab_size=12, causal=cls is TnnForCausalLM))
    with average_strands(model, dna_tokenizer()), pytest.raises(ValueError, match=f"sequences .*, got {cls.__name__}"):
        model(input_ids=torch.tensor([[0, 7, 8, 1]]))
