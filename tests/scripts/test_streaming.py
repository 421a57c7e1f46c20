"""Pretraining on streams: their order, what is held out, exact resume, and what is refused."""

import json
import shutil

import psutil
import pytest
import torch
from datasets import Dataset, IterableDataset

from helpers.programs import unlike
from helpers.scripts import (
    SENTENCES,
    assert_same_weights,
    at_call,
    read,
    run_ranks,
    run_script,
    words,
    write_config,
)
from tnn_scripts.common.accelerate_loop import Pretraining
from tnn_scripts.data.sources import MixedRows, Mixture, open_source
from tnn_scripts.data.streaming import TextStream, hold_out
from tnn_scripts.data.text import tokenize, train_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(Dataset.from_dict({"text": SENTENCES}), 300, masked=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A parquet file with two row groups, JSON lines, and a text file: texts tell their source and row."""
    folder = tmp_path_factory.mktemp("sources")
    rows = {
        name: Dataset.from_dict({"text": [f"{name} {i}." for i in range(200)], "other": range(200)}) for name in "ab"
    }
    rows["a"].to_parquet(folder / "a.parquet", batch_size=100)
    rows["b"].to_json(folder / "b.jsonl")
    (folder / "c.txt").write_text("\n".join(f"c {i}." for i in range(800)))
    return folder


def mixture(folder, *files, **options) -> Mixture:
    names = [str(folder / file) for file in files]
    return Mixture(names, [open_source(name)["train"] for name in names], **options)


def examples(stream: TextStream, start: int, stop: int, batch_size: int = 4, workers: int = 0) -> list[dict]:
    """The examples from `start` to `stop`, as the process of the stream gets them."""
    batches = stream.loader(batch_size, start, stop, workers)
    return [{name: batch[name][i] for name in batch} for batch in batches for i in range(len(batch["labels"]))]


def assert_same(first: list[dict], second: list[dict]):
    assert len(first) == len(second)
    for one, other in zip(first, second, strict=True):
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def texts_of(mixed: Mixture, epoch: int = 0, number: int = 0) -> list[list[str]]:
    """The texts of each part of a source in an epoch."""
    parts = [mixed.texts_of(mixed.rows_of(number, part, epoch)) for part in range(mixed.parts)]
    return [[text for texts in rows for text in texts] for rows in parts]


def test_parts_share_the_rows(folder, tmp_path):
    """Each row is in one part. Lines of a text file stay together. The next epoch has another order."""
    for number in range(6):
        Dataset.from_dict({"text": [f"{number} {i}" for i in range(200)]}).to_parquet(tmp_path / f"{number}.parquet")
    for source, file, count in ((folder, "a.parquet", 200), (folder, "b.jsonl", 200), (folder, "c.txt", 800),
                                (tmp_path, "", 1200)):  # fmt: skip
        for parts in (1, 2, 3):
            found = texts_of(mixture(source, file, parts=parts))
            assert sum(map(len, found)) == count == len(set().union(*found))
            assert max(map(len, found)) <= count / parts * 1.2
            if file == "c.txt":
                assert found[0][:100] == [f"c {i}." for i in range(100)]
    mixed = mixture(tmp_path, "")
    first, second = texts_of(mixed)[0], texts_of(mixed, 1)[0]
    assert first != second and sorted(first) == sorted(second) and texts_of(mixed)[0] == first


@pytest.mark.parametrize("weights", [None, [4, 1]])
def test_weights(weights, folder):
    """The shares of the rows, in turns unless given. A source that has ended begins again."""
    mixed = mixture(folder, "a.parquet", "b.jsonl", weights=weights)
    found = MixedRows(mixed, 0).next(1500)
    first = [text for text in found if text.startswith("a")]
    assert len(first) / len(found) == pytest.approx(0.8 if weights else 0.5, abs=0.03)
    assert sorted(first[:200]) == sorted(first[200:400]) == sorted(f"a {i}." for i in range(200))
    assert weights or [text[0] for text in found[:4]] == list("abab")


@pytest.mark.parametrize("processes, workers, masked", [(1, 2, True), (1, 9, False), (2, 0, True), (3, 1, False)])
def test_examples_by_number(processes, workers, masked, folder, tokenizer):
    """Example i is the same for any number of processes and workers."""
    mixed = mixture(folder, "a.parquet", "b.jsonl", weights=[0.5, 0.5], parts=4)

    def stream(process) -> TextStream:
        return TextStream(mixed, tokenizer, 16, masked, buffer_size=16, process=process)

    whole = examples(stream((0, 1)), 0, 48, 6)
    assert len({tuple(example["labels"].tolist()) for example in whole}) > 40
    for index in range(processes):
        own = examples(stream((index, processes)), 0, 48, 6 // processes, workers)
        assert_same(own, whole[index::processes])


@pytest.mark.parametrize("workers, files", [(2, ["b.jsonl", "a.parquet"]), (0, ["c.txt"])])
def test_resume(workers, files, folder, tokenizer):
    """From any step, also after the end of an epoch and by another number of processes."""
    weights = [0.7, 0.3] if len(files) == 2 else None
    mixed = mixture(folder, *files, weights=weights, parts=2)

    def stream(process=(0, 1)) -> TextStream:
        return TextStream(mixed, tokenizer, 32, True, buffer_size=20, process=process)

    unbroken, saved, stops = examples(stream(), 0, 160), {}, (4, 24, 120, 136)
    broken = stream()
    for number, _ in enumerate(broken.loader(4, 0, 140, workers), start=1):
        if number * 4 in stops:
            saved[number * 4] = json.dumps(broken.state_dict())
    for stop, state in saved.items():
        assert len(state) < 3000
        for process in [(0, 1), (1, 2)]:
            resumed = stream(process)
            resumed.load_state_dict(json.loads(state))
            index, processes = process
            assert_same(examples(resumed, stop, 160, 4 // processes), unbroken[stop + index :: processes])


def test_a_resumed_part_does_not_begin_again(folder, tokenizer, monkeypatch):
    read, original = [], Mixture.texts_of
    stream = TextStream(mixture(folder, "b.jsonl"), tokenizer, 16, False, buffer_size=8)
    examples(stream, 0, 60)

    def texts_of(*given):
        for texts in original(*given):
            read.append(texts)
            yield texts

    monkeypatch.setattr(Mixture, "texts_of", texts_of)
    examples(stream, 60, 61)
    assert len(read) == 64 and read[0] == ["b 128."]


def test_a_source_with_fewer_rows_than_shards(folder):
    rows = MixedRows(mixture(folder, "b.jsonl", parts=500), 300)
    with pytest.raises(ValueError, match="b.jsonl has no rows for shard 301 of 500"):
        rows.next(1)


def all_texts(mixed: Mixture, epoch: int) -> set[str]:
    return {text for number in range(len(mixed.sources)) for part in texts_of(mixed, epoch, number) for text in part}


def test_held_out(folder, tokenizer):
    """The first rows of each part of each source are in no epoch."""
    mixed = mixture(folder, "a.parquet", "b.jsonl", weights=[0.75, 0.25], parts=2)
    before = all_texts(mixed, 0)
    blocks = hold_out(mixed, 8, tokenizer, 16, masked=False)
    held = tokenizer.decode(blocks.flatten().tolist())
    assert blocks.shape == (8, 16) and held.count("a") > 2 * held.count("b") > 0 and "a 0." in held
    for epoch in (0, 1):
        left = all_texts(mixed, epoch)
        assert left < before and len(before - left) == sum(mixed.skipped.values()) == held.count(".")


@pytest.mark.parametrize("masked", [False, True])
def test_no_text_is_lost_after_what_is_held_out(masked, tokenizer, tmp_path):
    """The rest of a long row that is held out is what the training of its part begins with."""
    rows = [" ".join(f"{row}-{word}" for word in range(100)) for row in range(8)]
    Dataset.from_dict({"text": rows}).to_parquet(tmp_path / "long.parquet")
    mixed = mixture(tmp_path, "long.parquet", parts=2)
    texts = texts_of(mixed)
    held = hold_out(mixed, 4, tokenizer, 16, masked)
    inner = slice(1, -1) if masked else slice(None)
    for part in range(2):
        lines = tokenize(texts[part], tokenizer, None if masked else [True] * 4)
        expected = [token for line in lines for token in line]
        reader = TextStream(mixed, tokenizer, 16, masked).reader(part, 1)
        count = len(expected) // (14 if masked else 16)
        blocks = [*held[2 * part : 2 * part + 2], *(reader.block(number) for number in range(count - 2))]
        found = [token for block in blocks for token in block[inner].tolist()]
        assert found == expected[: len(found)] and len(expected) - len(found) < 16


@pytest.fixture
def options(folder, tmp_path):
    config = write_config(tmp_path / "config", hidden_dropout_prob=0.2)
    return words(f"--config_name {config} --streaming --dataset_name {folder}/a.parquet {folder}/b.jsonl",
                 "--interleave_probabilities 0.6 0.4 --num_shards 2 --shuffle_buffer_size 12 --block_size 16",
                 "--max_eval_blocks 6 --max_steps 8 --learning_rate 0.01 --per_device_train_batch_size 4",
                 "--checkpointing_steps 3")  # fmt: skip


class Killed(BaseException):
    pass


def kill():
    raise Killed


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_killed_run_that_is_resumed_is_the_unbroken_one(workers, options, tmp_path, monkeypatch):
    """Bit for bit; and no other stream resumes it."""
    options += ["--dataloader_num_workers", workers]
    run_script("pretrain", *options, f"--output_dir {tmp_path}/unbroken")
    metrics = read(tmp_path / "unbroken", "metrics")
    assert metrics["perplexity_before"] > metrics["perplexity"]
    with monkeypatch.context() as patched, pytest.raises(Killed):
        at_call(patched, Pretraining, "train_step", 6, kill)
        run_script("pretrain", *options, f"--output_dir {tmp_path}/broken")
    resumed = [*options, f"--output_dir {tmp_path}/broken --resume_from_checkpoint latest"]
    for given in ("--interleave_probabilities 0.5 0.5", "--shuffle_buffer_size 2", "--max_eval_blocks 40"):
        with pytest.raises(SystemExit, match="another run.\n  data must be "):
            run_script("pretrain", *resumed, given)
    run_script("pretrain", *resumed)
    assert_same_weights(tmp_path / "unbroken", tmp_path / "broken")
    assert metrics["loss"] == read(tmp_path / "broken", "metrics")["loss"]


def test_errors(options, folder, tmp_path):
    (folder / "bad.parquet").write_text("no parquet")
    assert not unlike("pretrain", [*options, f"--output_dir {tmp_path}/out"], {
        "--interleave_probabilities 1": "--interleave_probabilities must be one for each --dataset_name, got",
        "--interleave_probabilities 1 -1": "--interleave_probabilities must be above 0, got",
        "--text_column body": "--text_column must be a column of .*a.parquet, one of text, other, got body",
        "--text_column other": "--text_column must be a column of text, got other with ",
        "--documents headings": "--documents must be rows or lines with --streaming, got headings",
        "--block_size 8000": "must have 2 blocks of 8000 tokens for validation, got 0",
        "--dataset_config_name one": "--dataset_config_name must be one for each --dataset_name",
        f"--block_size 8000 --validation_file {folder}/c.txt --max_eval_blocks 1": "validation text is",
        f"--block_size 2000 --validation_file {folder}/c.txt --max_eval_blocks 1": "train text is shorter",
        f"--dataset_name {folder}/a.parquet {folder}/c.txt": "--documents must be rows or lines for text files",
        f"--dataset_name {folder}/bad.parquet {folder}/b.jsonl": "bad.parquet has no rows that can be read: ",
    })  # fmt: skip
    several = {f"--dataset_name {folder} {folder}": "--dataset_name must be one source without --streaming, got"}
    assert not unlike("pretrain", [f"--output_dir {tmp_path}/out"], several)


@pytest.mark.slow
@pytest.mark.parametrize("config", ["cpu-gloo", "cpu-fsdp2"])
def test_two_processes(config, options, tmp_path):
    """They resume bit for bit, do what one process does, and resume what one began, unless in shards."""
    options += ["--config_overrides hidden_dropout_prob=0"]
    two = [*options, "--per_device_train_batch_size 2 --dataloader_num_workers 1"]
    run_script("pretrain", *options, f"--output_dir {tmp_path}/one")
    run_ranks("pretrain", *two, f"--output_dir {tmp_path}/two", config=config)
    assert_same_weights(tmp_path / "one", tmp_path / "two", tolerance=1e-5)
    for name, tolerance in [("two", 0.0), ("one", 1e-5)][: 2 if config == "cpu-gloo" else 1]:
        resumed = tmp_path / f"from-{name}"
        shutil.copytree(tmp_path / name / "checkpoint-3", resumed / "checkpoint-3")
        run_ranks("pretrain", *two, f"--output_dir {resumed} --resume_from_checkpoint latest", config=config)
        assert_same_weights(resumed, tmp_path / "two", tolerance)


@pytest.mark.slow
def test_memory_is_constant(tokenizer):
    """Over two hundred thousand documents, from the first tenth on."""

    def documents(shards):
        for shard in shards:
            yield from ({"text": f"document {shard} {i}"} for i in range(25_000))

    source = IterableDataset.from_generator(documents, gen_kwargs={"shards": list(range(8))})
    stream = TextStream(
        Mixture(["generated"], [source], documents="rows", parts=8), tokenizer, 128, False, buffer_size=1000
    )
    process, resident = psutil.Process(), []
    for _ in stream.loader(32, 0, 10**9):
        read = sum(json.loads(state)["rows"]["read"] for state in stream.states if state)
        if read >= 20_000 * (len(resident) + 1):
            resident.append(process.memory_info().rss)
        if len(resident) == 10:
            break
    assert max(resident) < 1.05 * min(resident)
