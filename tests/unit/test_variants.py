"""Scores of variants against a computation letter by letter, and what is refused."""

import numpy as np
import pytest
import torch

from helpers.models import seeded, slow, tiny_config
from modeling_tnn import TnnForCausalLM, TnnForMaskedLM
from modeling_tnn.data.variants import Variant, read_variants, score_variants, window_of
from modeling_tnn.tools.dna import dna_tokenizer

LETTERS = "".join(np.random.default_rng(1).choice(list("ACGTacgt"), 40)) + "GATTACA"
GENOME = {"one": np.frombuffer(LETTERS.encode(), dtype=np.uint8)}
OTHER = {"A": "C", "C": "G", "G": "T", "T": "A"}
# In the middle, at both ends, of several letters, an insertion and a deletion.
PLACES = [(20, 1, 1), (1, 1, 1), (47, 1, 1), (25, 3, 3), (30, 1, 4), (33, 3, 1)]


def variant(position: int, reference: int, alternative: int) -> Variant:
    old = LETTERS[position - 1 : position - 1 + reference].upper()
    return Variant("one", position, old, "".join(OTHER[letter] for letter in (old * 4)[:alternative]))


def windows(one: Variant, length: int) -> tuple[str, str, int]:
    """The windows with the reference and the alternative, and where in them the variant is."""
    start = one.position - 1
    first = min(max(start - (length - len(one.reference)) // 2, 0), max(len(LETTERS) - length, 0))
    whole, place = LETTERS[first : first + length].upper(), start - first
    return whole, whole[:place] + one.alternative + whole[place + len(one.reference) :], place


def turned(letters: str) -> str:
    return letters[::-1].translate(str.maketrans("ACGT", "TGCA"))


def naive_likelihood(model, letters: str) -> float:
    """The sum of what a model says of each letter, with a pass for each."""
    ids = dna_tokenizer()(letters, add_special_tokens=False).input_ids
    scores = [model(torch.tensor([ids[:end]])).logits[0, -1].log_softmax(-1)[ids[end]] for end in range(1, len(ids))]
    return sum(scores).item()


@pytest.mark.parametrize("length, both", [(17, True), *slow((500, False))])
def test_a_causal_model(length, both):
    model = seeded(TnnForCausalLM, tiny_config(vocab_size=12)).double().eval()
    variants = [variant(*place) for place in PLACES]
    found = score_variants(model, dna_tokenizer(), GENOME, variants, length, batch_size=3, both_strands=both)
    for one, score in zip(variants, found.tolist(), strict=True):
        old, new, _ = windows(one, length)
        strands = [(old, new), (turned(old), turned(new))][: 1 + both]
        expected = [naive_likelihood(model, new) - naive_likelihood(model, old) for old, new in strands]
        assert score == pytest.approx(np.mean(expected), abs=1e-5), one


@pytest.mark.parametrize("both", [False, True])
def test_a_masked_model(both):
    model, tokenizer = seeded(TnnForMaskedLM, tiny_config(vocab_size=12, causal=False)).eval(), dna_tokenizer()
    variants = [variant(*place) for place in PLACES[:4]]
    found = score_variants(model, tokenizer, GENOME, variants, 17, both_strands=both)
    for one, score in zip(variants, found.tolist(), strict=True):
        old, new, place = windows(one, 17)
        expected, count = [], len(one.reference)
        for before, after, start in [(old, new, place), (turned(old), turned(new), 17 - place - count)][: 1 + both]:
            ids = torch.tensor([tokenizer(before).input_ids])
            places = range(1 + start, 1 + start + count)
            ids[0, places] = tokenizer.mask_token_id
            logs, new_ids, old_ids = model(ids).logits[0].log_softmax(-1), *map(tokenizer, (after, before))
            expected.append(sum(logs[i, new_ids.input_ids[i]] - logs[i, old_ids.input_ids[i]] for i in places).item())
        assert score == pytest.approx(np.mean(expected), abs=1e-5), one
    with pytest.raises(ValueError, match="must keep the number of letters with a masked model, got '.' to '....'"):
        score_variants(model, tokenizer, GENOME, [variant(*PLACES[4])], 17)


def test_files_and_what_is_refused(tmp_path):
    (tmp_path / "a.vcf").write_text("##x\n#CHROM\tPOS\tID\tREF\tALT\none\t40\t.\tA\tC,GG\t.\nsix\t1\trs1\tt\tA\n")
    expected = [Variant("one", 40, "A", "C"), Variant("one", 40, "A", "GG"), Variant("six", 1, "t", "A")]
    assert read_variants(str(tmp_path / "a.vcf")) == expected
    for line in ("one\t40\t.\tA\t<DEL>", "one\tx\t.\tA\tC", "one\t40\t.\tA"):
        (tmp_path / "bad.vcf").write_text(f"{line}\n")
        with pytest.raises(ValueError, match="Line 1 of .*bad.vcf must be CHROM POS ID REF ALT"):
            read_variants(str(tmp_path / "bad.vcf"))
    for wrong in (Variant("six", 1, "A", "C"), Variant("one", 0, "A", "C"), Variant("one", 47, "AC", "C"),
                  Variant("one", 41, "T", "C"), Variant("one", 41, "GATTACA", "C")):  # fmt: skip
        with pytest.raises(ValueError, match="must be what the genome has there, and shorter than 7, got"):
            window_of(GENOME, wrong, 7)
