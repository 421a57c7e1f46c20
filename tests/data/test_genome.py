"""FASTA files as the data of a pretraining: windows, regions, splits, the other strand, and what is predicted."""

import gzip
import re
import shutil
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForMaskedLM, AutoTokenizer

from helpers.programs import unlike
from helpers.scripts import assert_same_weights, read, run, run_script, words, write_config
from modeling_tnn.data.dna import dna_tokenizer, reverse_complement
from modeling_tnn.data.genome import (
    GenomeStream,
    read_fasta,
    read_regions,
    split_windows,
    whole,
    windows_of,
)
from tnn_programs.cli.text_files import is_fasta
from tnn_programs.data.genome import build_genome_streams

bgzf = pytest.importorskip("Bio.bgzf")
DRAWN = np.random.default_rng(0).choice(list("ACGT"), 3000)
CONTIGS = {"one": "".join(DRAWN[:997]), "two": "".join(DRAWN[997:])}


def write_fasta(file, contigs: dict[str, str] = CONTIGS, opened=open):
    with opened(file, "wt") as lines:
        for name, letters in contigs.items():
            parts = [letters[start : start + 60] for start in range(0, len(letters), 60)]
            lines.write("\n".join([f">{name} a title", *parts, ""]))
    return file


def stream(contigs: dict[str, str], size: int, **options) -> GenomeStream:
    genome = {name: np.frombuffer(letters.encode(), dtype=np.uint8) for name, letters in contigs.items()}
    windows = windows_of(genome, whole(genome), size - (2 if options.get("masked") else 0))
    return GenomeStream(genome, windows, dna_tokenizer(), size, **{"masked": False, "shuffle": False} | options)


def test_files(tmp_path, caplog):
    """The same letters from a plain file, one of gzip and one of bgzip, in both cases, by suffix or content."""
    contigs = CONTIGS | {"three": "acgtNNRY"}
    for name, opened in (("a.fa", open), ("b.fasta.gz", gzip.open), ("c.FFN.bgz", bgzf.open), ("d.fas", open),
                         ("e.txt", open), ("f.dat.gz", gzip.open), ("g", open)):  # fmt: skip
        assert name[0] in "efg" or is_fasta(name)
        assert is_fasta(str(write_fasta(tmp_path / name, contigs, opened)))
        genome = read_fasta(str(write_fasta(tmp_path / name, contigs, opened)))
        assert {name: letters.tobytes().decode() for name, letters in genome.items()} == contigs
    for text in ("> To be, or not\nto be, that is\n", ">a\n>b\n", "ACGT\n", "\n"):
        (tmp_path / "h.txt").write_text(text)
        assert not is_fasta(str(tmp_path / "h.txt"))
    write_fasta(tmp_path / "i.fa", {"empty": "", "a": "ACGT"})
    with caplog.at_level("INFO"):
        assert len(read_fasta(str(tmp_path / "i.fa"))["a"]) == 4 and "have no letters: empty" in caplog.text


@pytest.mark.parametrize("content, message", [
    (b"\n", "must have sequences in FASTA, got none"),
    (b"ACGT\n>a\nAC\n", "must begin with `>` and a name, got 'ACGT"),
    (b">a\nMKVLAAGIVGLLLAQWERTY\n", "Most letters of .*a.fa must be A, C, G, T or N, got 30%: is it .* proteins"),
    (b">a\n>b\n", "must have sequences in FASTA, got none"),
    (b">a\nAC\n>a x\nGT\n", "cannot be read as FASTA: it has two sequences with the name 'a'"),
    (b">a\nA\xff\n", "cannot be read as FASTA: 'utf-8' codec"),
    ("\u00e4".join([">a\nA", "\n"]).encode(), "cannot be read as FASTA: 'ascii' codec"),
])  # fmt: skip
def test_damaged_files(content, message, tmp_path):
    (tmp_path / "a.fa").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_fasta(str(tmp_path / "a.fa"))


def test_a_cut_archive(tmp_path):
    file = write_fasta(tmp_path / "a.fa.gz", opened=gzip.open)
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"a.fa.gz cannot be read as FASTA: Compressed file ended"):
        read_fasta(str(file))


@pytest.mark.parametrize("size", [7, 63, 100])
def test_windows_of_contigs(size):
    """Each example is what the tokenizer makes of the letters, one after the other along a contig."""
    tokenizer, examples = dna_tokenizer(), stream(CONTIGS, size)
    expected = [c[i : i + size] for c in CONTIGS.values() for i in range(0, len(c) - size + 1, size)]
    assert len(examples) == len(expected)
    for number, letters in enumerate(expected):
        ids = tokenizer(letters, add_special_tokens=False).input_ids
        assert examples[number]["input_ids"].tolist() == examples[number]["labels"].tolist() == ids


def test_regions_and_splits(tmp_path):
    """Windows around short regions and along long ones; by the column of the file, by contig, or the last 5%."""
    genome = read_fasta(str(write_fasta(tmp_path / "a.fa")))
    lines = [
        "# a comment",
        "track x",
        "one\t100\t103\tTRAIN",
        "one\t0\t4\tvalid",
        "two\t2000\t2003\ttest",
        "two\t7\t40\ttrain",
    ]
    (tmp_path / "a.bed").write_text("\n".join([*lines, ""]))
    found = windows_of(genome, read_regions(str(tmp_path / "a.bed"), genome), 10)
    starts = [("one", 96), ("one", 0), ("two", 1993), ("two", 7), ("two", 17), ("two", 27)]
    assert [window[:2] for window in found] == starts
    assert [[window[:2] for window in part] for part in split_windows(found)] == [
        [starts[0], *starts[3:]],
        starts[1:2],
    ]
    with pytest.raises(ValueError, match="Contigs of validation must be absent with regions of train, valid and test"):
        split_windows(found, ["two"])
    windows = windows_of(genome, whole(genome), 10)
    train, validation = split_windows(windows, ["two"])
    assert {contig for contig, *_ in train} == {"one"} and {contig for contig, *_ in validation} == {"two"}
    train, validation = split_windows(windows)
    assert train + validation == windows and len(validation) == round(0.05 * len(windows))
    assert not windows_of({"one": genome["one"][:9]}, [("one", 0, 9, None)], 10)
    for line, message in (("one\t5", "`contig start end`, got 'one"), ("one 5 998", "in one with 997 letters"),
                          ("six 5 6", "in a contig of the genome, one, two, got"), ("one 6 6", "in one with 997"),
                          ("one 6 9 trian", "train, valid or test, "), ("tracks 5 6", "in a contig")):  # fmt: skip
        (tmp_path / "bad.bed").write_text(f"{line}\none 0 9 valid\n")
        with pytest.raises(ValueError, match=f"Line 1 of .*bad.bed must be .*{message}"):
            read_regions(str(tmp_path / "bad.bed"), genome)


def test_the_other_strand():
    """Every second window or so, the same at each reading, another one in the next epoch; never in an evaluation."""
    tokenizer, plain = dna_tokenizer(), stream(CONTIGS, 63)
    both = stream(CONTIGS, 63, reverse_complement=True)
    turned = []
    for number in range(2 * len(plain)):
        ids, found = plain[number]["input_ids"], both[number]["input_ids"]
        turned.append(not torch.equal(ids, found))
        assert torch.equal(found, both[number]["input_ids"])
        assert not turned[-1] or torch.equal(found, reverse_complement(ids[None], tokenizer)[0])
    assert 0.3 < np.mean(turned) < 0.7 and turned[: len(plain)] != turned[len(plain) :]
    assert plain.describe() != both.describe()


@pytest.mark.parametrize("masked", [False, True])
def test_what_is_predicted(masked):
    """Neither N nor, without a weight, lower case; windows that are mostly such are left out."""
    letters = "ACGTacgtNNACGTACGTac" + "N" * 12 + "acgtacgt" + "ACGTTGCAACGTTGCAACGT"
    size = 20 + 2 * masked
    for weight in (1.0, 0.0):
        examples = stream({"one": letters}, size, masked=masked, mlm_probability=0.9, soft_masked_weight=weight)
        assert len(examples) == 2
        ids, labels = examples[0]["input_ids"], examples[0]["labels"]
        expected = [letter in ("ACGTacgt" if weight else "ACGT") for letter in letters[:20]]
        predicted = (labels != -100).tolist()
        if not masked:
            assert predicted == expected
            continue
        assert ids[0] == 0 and ids[-1] == 1 and not predicted[0] and not predicted[-1]
        assert sum(predicted) > 5 and not any(p and not e for p, e in zip(predicted[1:-1], expected, strict=True))


@pytest.mark.slow
def test_the_weight_of_lower_case():
    """The mean of the losses of many epochs is the weighted loss; the same letters when an example is read again."""
    letters = CONTIGS["one"][:630]
    soft = np.random.default_rng(1).random(630) < 0.7
    text = "".join(letter.lower() if lower else letter for letter, lower in zip(letters, soft, strict=True))
    examples = stream({"one": text}, 63, soft_masked_weight=0.3, reverse_complement=True)
    assert len(examples) == 10  # most letters are in lower case
    losses = torch.rand(630, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    plain, counts, total = dna_tokenizer()(letters, add_special_tokens=False).input_ids, np.zeros(630), 400
    for number in range(10 * total):
        example, start = examples[number], 63 * (number % 10)
        labels = example["labels"].tolist()
        assert labels == examples[number]["labels"].tolist()
        turned = example["input_ids"].tolist() != plain[start : start + 63]
        counts[start : start + 63] += [label != -100 for label in (labels[::-1] if turned else labels)]
    assert (counts[~soft] == total).all() and counts[soft].min() > 0 and counts[soft].max() < total
    weighted = (losses.numpy() * np.where(soft, 0.3, 1.0)).sum()
    assert abs((losses.numpy() * counts / total).sum() / weighted - 1) < 0.02


@pytest.mark.parametrize("weight", [1.0, 0.9])
def test_validation_draws_no_letters(weight, tmp_path):
    args = Namespace(
        objective="clm", mlm_probability=0.15, block_size=20, seed=0, regions=None, validation_contigs=["one"],
        train_file=str(write_fasta(tmp_path / "a.fa", {"one": "acgtacgtACGTACGTACGT", "two": "acgtACGTACGTACGTACGT"})),
        validation_file=None, reverse_complement=False, soft_masked_weight=weight, max_eval_blocks=None,
    )  # fmt: skip
    _, validation = build_genome_streams(args, dna_tokenizer())
    assert (validation[0]["labels"] != -100).tolist() == [weight == 1] * 8 + [True] * 12
    (tmp_path / "a.bed").write_text("one 0 20 test\ntwo 0 20 train\n")  # a test is not trained on, whatever validates
    args.validation_file, args.regions, args.validation_contigs = args.train_file, str(tmp_path / "a.bed"), []
    train, validation = build_genome_streams(args, dna_tokenizer())
    assert train.blocks == [("two", 0, "train")] and len(validation) == 2


def test_a_run(tmp_path, monkeypatch):
    """Masked pretraining, resumed with the weights of an unbroken run; the folder has the tokenizer of DNA."""
    monkeypatch.chdir(tmp_path)
    write_fasta(tmp_path / "a.fa.gz", opened=gzip.open)
    config = write_config(tmp_path / "config", causal=False)
    given = words(f"--config_name {config} --objective mlm --train_file a.fa.gz --block_size 65 --reverse_complement",
                  "--per_device_train_batch_size 4 --learning_rate 0.01 --checkpointing_steps 2")  # fmt: skip
    given += words("--max_steps 4 --output_dir whole")
    run_script("pretrain", *given)
    shutil.copytree("whole", "unbroken")
    run_script("pretrain", *given, "--resume_from_checkpoint", "whole/checkpoint-2")
    assert_same_weights(Path("whole"), Path("unbroken"))
    metrics = read(Path("whole"), "metrics")
    assert metrics["perplexity"] < metrics["perplexity_before"]
    model, tokenizer = (auto.from_pretrained("whole") for auto in (AutoModelForMaskedLM, AutoTokenizer))
    assert model.config.vocab_size == len(tokenizer) == 12 and tokenizer("ac").input_ids == [0, 7, 8, 1]
    ended = run("pretrain", *given, "--resume_from_checkpoint", "latest", "--soft_masked_weight", "0.1", check=False)
    assert ended.returncode == 2 and "data must be" in ended.stderr


def test_what_is_next(tmp_path, monkeypatch, caplog, capsys):
    """A causal model is to continue DNA, by a command that works; a masked one becomes a classifier of DNA."""
    monkeypatch.chdir(tmp_path)
    write_fasta(tmp_path / "a.fa")
    for objective, command in (("mlm", "finetune-glue"), ("clm", "generate")):
        config = write_config(tmp_path / objective, causal=objective == "clm")
        given = f"--config_name {config} --objective {objective} --train_file a.fa --block_size 65 --max_steps 1"
        run_script("pretrain", given, f"--learning_rate 0.01 --output_dir out-{objective}")
        assert f"tnn {command} --model_name_or_path out-{objective} --" in caplog.text
    assert "--dataset_name katarinagresova/" in caplog.text and "sst2" not in caplog.text
    (prompt,) = re.findall('--prompt "([ACGT]+)"', caplog.text)
    capsys.readouterr()
    run_script("generate", f"--model_name_or_path out-clm --prompt {prompt} --max_new_tokens 9 --device cpu")
    assert prompt in capsys.readouterr().out


def test_what_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_fasta(tmp_path / "a.fa"), (tmp_path / "a.txt").write_text("ACGT\n" * 90)
    config = write_config(tmp_path / "config")
    given = words(f"--config_name {config} --output_dir out --max_steps 1 --block_size 60")
    assert not unlike("pretrain", [*given, "--train_file", "a.fa"], {
        "--streaming": "--streaming must be absent with a FASTA file",
        "--regions nowhere.bed": "nowhere.bed does not exist",
        "--validation_contigs six": "Contigs of validation must have at least a window, got six",
        "--validation_contigs one two": "The train data must have 60 letters for a window",
        "--validation_file a.txt": "--validation_file must be FASTA",
        "--soft_masked_weight 1.1": "--soft_masked_weight must be a number from 0 to 1, got 1.1",
        "--block_size 3000": "must have 3000 letters for a window",
    })  # fmt: skip
    assert not unlike("pretrain", [*given, "--train_file", "a.txt"], {
        "--reverse_complement": "--reverse_complement must be given together with a FASTA file, got a.txt",
        "--soft_masked_weight 0": "--soft_masked_weight must be given together with a FASTA file, got a.txt",
        "--validation_file a.fa": "FASTA is read as a genome by `tnn pretrain` alone, got a.fa",
    })  # fmt: skip
