"""A small model of Evo 2's kind, and the files that the guide to Evo 2 says its reader has."""

from pathlib import Path

from helpers.models import seeded
from modeling_tnn import TnnForCausalLM, load_preset
from tnn_programs.original.evo2 import byte_tokenizer


def evo2(head: type, **fields):
    """A model with a layer of each kind, in float64."""
    return seeded(head, load_preset("evo2-tiny", **fields)).double().eval()


def write_files():
    """A folder of a model, sequences in FASTA and their labels, in the present folder."""
    evo2(TnnForCausalLM).bfloat16().save_pretrained("evo2-7b")
    byte_tokenizer().save_pretrained("evo2-7b")
    sequences = {f"s{number}": "GATTACA" * (number + 3) for number in range(20)}
    Path("sequences.fa").write_text("".join(f">{name}\n{letters}\n" for name, letters in sequences.items()))
    Path("labels.tsv").write_text(
        "".join(f"{name}\t{'even' if i % 2 == 0 else 'odd'}\n" for i, name in enumerate(sequences))
    )
