"""DNA in a model of Evo 2's kind, whose tokens are bytes: variants, both strands, embeddings, long reads."""

import numpy as np
import pytest
import torch

from helpers.evo2_models import evo2
from helpers.models import relative_error
from modeling_tnn import TnnForCausalLM, TnnForSequenceClassification, TnnModel
from modeling_tnn.data.dna import average_strands, nucleotide_ids, reverse_complement
from modeling_tnn.data.variants import Variant, score_variants
from tnn_programs.original.evo2 import byte_tokenizer

TOKENIZER = byte_tokenizer()
LETTERS = "".join(np.random.default_rng(1).choice(list("ACGTacgt"), 300))


@torch.no_grad()
def likelihood(model, letters: str) -> float:
    """The sum of the log-probabilities of letters after the first one."""
    ids = torch.tensor([list(letters.encode())])
    scores = model(ids).logits[:, :-1].log_softmax(-1)
    return scores.gather(2, ids[:, 1:, None]).sum().item()


def batch_of(*sequences: str) -> dict[str, torch.Tensor]:
    return dict(TOKENIZER([*sequences], padding=True, return_tensors="pt"))


@pytest.mark.parametrize("both", [False, True])
def test_scores_of_variants(both):
    """A substitution, an insertion and a deletion. A genome may have lower case, a window has not."""
    model, genome = evo2(TnnForCausalLM), {"one": np.frombuffer(LETTERS.encode(), dtype=np.uint8)}
    places = [(150, 1, "N"), (100, 1, "ACGT"), (200, 3, "A")]
    variants = [Variant("one", start, LETTERS[start - 1 : start - 1 + count], new) for start, count, new in places]
    found = score_variants(model, TOKENIZER, genome, variants, 400, both_strands=both)
    for one, score in zip(variants, found.tolist(), strict=True):
        after = LETTERS[one.position - 1 + len(one.reference) :]
        pair = [LETTERS, LETTERS[: one.position - 1] + one.alternative + after]
        if both:
            pair += [letters.upper().translate(str.maketrans("ACGT", "TGCA"))[::-1] for letters in pair]
        old, new = np.reshape([likelihood(model, letters.upper()) for letters in pair], (-1, 2)).mean(0)
        assert score == pytest.approx(new - old, abs=1e-5), one


def test_both_strands_of_a_classifier():
    """Bytes in lower case have complements of their own; padding, on the left, stays where it is."""
    assert nucleotide_ids(TOKENIZER) == [65, 67, 71, 84]
    batch, other = batch_of("AACGTNG", "ACCa"), batch_of("CNACGTT", "tGGT")
    assert torch.equal(reverse_complement(batch["input_ids"], TOKENIZER), other["input_ids"])
    for pooling in ("last", "mean"):
        model = evo2(TnnForSequenceClassification, classifier_pooling=pooling)
        with torch.no_grad(), average_strands(model, TOKENIZER):
            assert relative_error(model(**batch).logits, model(**other).logits) < 1e-12
            assert relative_error(model(**batch).logits[1:], model(**batch_of("ACCa")).logits) < 1e-12


def test_embeddings_of_padded_sequences():
    model, sequences = evo2(TnnModel), ["GATTACA", LETTERS]
    batch = batch_of(*sequences)
    with torch.no_grad():
        states = model(**batch, output_hidden_states=True, use_cache=False).hidden_states[2]
        real = batch["attention_mask"][..., None]
        means = (states * real).sum(1) / real.sum(1)
        for mean, sequence in zip(means, sequences, strict=True):
            alone = model(**batch_of(sequence), output_hidden_states=True, use_cache=False).hidden_states[2]
            assert relative_error(mean, alone[0].mean(0)) < 1e-12


def test_long_reads_in_chunks():
    """Chunks of 300 and of 5000 letters; a prompt that `generate` reads in chunks."""
    model, batch = evo2(TnnForCausalLM), batch_of(LETTERS * 40)
    ids, cache, states = batch["input_ids"], None, []
    with torch.no_grad():
        whole = model.model(ids, use_cache=False).last_hidden_state
        for chunk in ids.split([300, 5000, 5000, 1700], dim=1):
            outputs = model.model(chunk, past_key_values=cache, use_cache=True)
            cache = outputs.past_key_values if "past_key_values" in outputs else outputs.cache
            states.append(outputs.last_hidden_state)
        assert relative_error(torch.cat(states, dim=1), whole) < 1e-6
    texts = [
        model.generate(**batch, max_new_tokens=9, do_sample=False, **options)
        for options in ({}, {"prefill_chunk_size": 4096})
    ]
    assert torch.equal(*texts)
