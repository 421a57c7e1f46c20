"""Pretraining on streams: their order, what is held out, exact resume, and what is refused."""

import json
import shutil

import psutil
import pytest
from datasets import Dataset, IterableDataset

from helpers.models import slow
from helpers.programs import unlike
from helpers.scripts import SENTENCES, assert_same_weights, at_call, read, run_ranks, run_script, words, write_config
from modeling_tnn.data.text import tokenize, train_tokenizer
from tnn_programs.data import streaming
from tnn_programs.data.mixture import MixedRows, Mixture, open_source
from tnn_programs.data.streaming import TextStream, hold_out
from tnn_programs.training.accelerate_loop import Pretraining


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(Dataset.from_dict({"text": SENTENCES}), 300, masked=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Parquet files with two row groups each, JSON lines, and a text file: texts tell their source and row."""
    folder = tmp_path_factory.mktemp("sources")
    for name in "ab012345":
        rows = Dataset.from_dict({"text": [f"{name} {i}." for i in range(200)], "other": range(200)})
        rows.to_parquet((folder if name in "ab" else folder / "many") / f"{name}.parquet", batch_size=100)
        if name == "b":
            rows.to_json(folder / "b.jsonl")
    (folder / "c.txt").write_text("\n".join(f"c {i}." for i in range(800)))
    return folder


def mixture(folder, *files, **options) -> Mixture:
    names = [str(folder / file) for file in files]
    return Mixture(names, [open_source(name)["train"] for name in names], **options)


def examples(stream: TextStream, start: int, stop: int, batch_size: int = 4, workers: int = 0) -> list[list]:
    """The examples from `start` to `stop`, as the process of the stream gets them."""
    batches = stream.loader(batch_size, start, stop, workers)
    return [
        [batch[name][i].tolist() for name in sorted(batch)] for batch in batches for i in range(len(batch["labels"]))
    ]


def texts_of(mixed: Mixture, epoch: int = 0, number: int = 0) -> list[list[str]]:
    """The texts of each part of a source in an epoch."""
    parts = [mixed.texts_of(mixed.rows_of(number, part, epoch)) for part in range(mixed.parts)]
    return [[text for texts in rows for text in texts] for rows in parts]


@pytest.mark.parametrize("file, count", [("a.parquet", 200), ("b.jsonl", 200), ("c.txt", 800), ("many", 1200)])
def test_parts_share_the_rows(file, count, folder):
    """Each row is in one part. Lines of a text file stay together. The next epoch of files has another order."""
    for parts in (1, 2, 3):
        found = texts_of(mixture(folder, file, parts=parts))
        assert sum(map(len, found)) == count == len(set().union(*found))
        assert max(map(len, found)) <= count / parts * 1.2
        assert file != "c.txt" or found[0][:100] == [f"c {i}." for i in range(100)]
    mixed = mixture(folder, file)
    (first,), (second,) = texts_of(mixed), texts_of(mixed, 1)
    assert sorted(first) == sorted(second) and texts_of(mixed) == [first] and (first != second) == (file == "many")
    with pytest.raises(ValueError, match=f"{file} has no rows for shard 1901 of 2000"):
        MixedRows(mixture(folder, file, parts=2000), 1900).next(1)


@pytest.mark.parametrize("weights", [None, [4, 1]])
def test_weights(weights, folder):
    """The shares of the rows, in turns unless given. A source that has ended begins again."""
    found = MixedRows(mixture(folder, "a.parquet", "b.parquet", weights=weights), 0).next(1500)
    first = [text for text in found if text.startswith("a")]
    assert len(first) / len(found) == pytest.approx(0.8 if weights else 0.5, abs=0.03)
    assert sorted(first[:200]) == sorted(first[200:400]) == sorted(f"a {i}." for i in range(200))
    assert weights or [text[0] for text in found[:4]] == list("abab")


@pytest.mark.parametrize("processes, workers, masked", [(1, 2, True), (2, 0, True), *slow((3, 1, False))])
def test_examples_by_number(processes, workers, masked, folder, tokenizer):
    """Example i is the same for any number of processes and workers."""
    mixed = mixture(folder, "a.parquet", "b.jsonl", weights=[0.5, 0.5], parts=4)

    def stream(process) -> TextStream:
        return TextStream(mixed, tokenizer, 16, masked, buffer_size=16, process=process)

    whole = examples(stream((0, 1)), 0, 48, 6)
    assert len({str(example) for example in whole}) > 40
    for index in range(processes):
        own = examples(stream((index, processes)), 0, 48, 6 // processes, workers)
        assert own == whole[index::processes]


@pytest.mark.parametrize("workers, files", [(2, ["b.jsonl", "a.parquet"]), *slow((0, ["c.txt"]))])
def test_resume(workers, files, folder, tokenizer):
    """From any step, also after the end of an epoch and by another number of processes."""
    mixed = mixture(folder, *files, weights=[0.7, 0.3][: len(files)] if len(files) == 2 else None, parts=2)

    def stream(process=(0, 1)) -> TextStream:
        return TextStream(mixed, tokenizer, 32, True, buffer_size=20, process=process)

    unbroken, saved, stops = examples(stream(), 0, 160), {}, (4, 24, 120, 136)
    broken = stream()
    for number, _ in enumerate(broken.loader(4, 0, 140, workers), start=1):
        if number * 4 in stops:
            saved[number * 4] = json.dumps(broken.state_dict())
    for stop, state in saved.items():
        assert len(state) < 3000
        for index, processes in [(0, 1), (1, 2)]:
            resumed = stream((index, processes))
            resumed.load_state_dict(json.loads(state))
            assert examples(resumed, stop, 160, 4 // processes) == unbroken[stop + index :: processes]


def test_each_process_tells_of_its_own_parts(folder, tokenizer, monkeypatch):
    """After a resume too: what the others read since is not what a process loaded of their parts."""
    first, second = (
        TextStream(mixture(folder, "a.parquet", parts=2), tokenizer, 16, False, process=(i, 2)) for i in (0, 1)
    )
    for start in (0, 80, 160):  # a run, and what it does after a resume
        for stream in (first, second):
            examples(stream, start, start + 80)
        sent = []
        monkeypatch.setattr(streaming, "gather_object", lambda own: sent.extend(own) or list(reversed(sent)))  # noqa: B023
        second.state_dict()
        saved = first.state_dict()
        assert saved["parts"] == [first.states[0], second.states[1]] and None not in saved["parts"]
        for stream in (first, second):
            stream.load_state_dict(saved)


def test_a_resumed_part_does_not_begin_again(folder, tokenizer, monkeypatch):
    read, original = [], Mixture.texts_of
    stream = TextStream(mixture(folder, "b.jsonl"), tokenizer, 16, False, buffer_size=8)
    examples(stream, 0, 60)
    monkeypatch.setattr(
        Mixture, "texts_of", lambda *given: (read.append(texts) or texts for texts in original(*given))
    )
    examples(stream, 60, 61)
    assert len(read) == 64 and read[0] == ["b 128."]


@pytest.mark.parametrize("masked", [False, True])
def test_what_is_held_out(masked, folder, tokenizer, tmp_path):
    """The first rows of each part of each source, by weight, are in no epoch; the rest of a long row is trained on."""
    mixed = mixture(folder, "a.parquet", "b.parquet", weights=[0.75, 0.25], parts=2)
    everything = {text for number in (0, 1) for part in texts_of(mixed, 0, number) for text in part}
    blocks = hold_out(mixed, 8, tokenizer, 16, masked)
    held = tokenizer.decode(blocks.flatten().tolist())
    assert blocks.shape == (8, 16) and held.count("a") > 2 * held.count("b") > 0 and "a 0." in held
    left = [
        {text for number in (0, 1) for part in texts_of(mixed, epoch, number) for text in part} for epoch in (0, 1)
    ]
    assert left[0] == left[1] < everything and len(everything - left[0]) == sum(mixed.skipped.values())
    rows = [" ".join(f"{row}-{word}" for word in range(100)) for row in range(8)]
    Dataset.from_dict({"text": rows}).to_parquet(tmp_path / "long.parquet")
    mixed = mixture(tmp_path, "long.parquet", parts=2)
    texts, held = texts_of(mixed), hold_out(mixed, 4, tokenizer, 16, masked)
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


@pytest.mark.parametrize("workers", slow(0, 2))
def test_a_killed_run_that_is_resumed_is_the_unbroken_one(workers, options, tmp_path, monkeypatch):
    """Bit for bit; and no other stream resumes it."""
    options += ["--dataloader_num_workers", workers]
    run_script("pretrain", *options, f"--output_dir {tmp_path}/unbroken")
    metrics = read(tmp_path / "unbroken", "metrics")
    assert metrics["perplexity_before"] > metrics["perplexity"]
    with monkeypatch.context() as patched, pytest.raises(Killed):
        at_call(patched, Pretraining, "_train_step", 6, kill)
        run_script("pretrain", *options, f"--output_dir {tmp_path}/broken")
    resumed = [*options, f"--output_dir {tmp_path}/broken --resume_from_checkpoint latest"]
    for given in ("--interleave_probabilities 0.5 0.5", "--shuffle_buffer_size 2", "--max_eval_blocks 40"):
        with pytest.raises(SystemExit, match="another run.\n  data must be "):
            run_script("pretrain", *resumed, given)
    run_script("pretrain", *resumed)
    assert_same_weights(tmp_path / "unbroken", tmp_path / "broken")
    assert metrics["loss"] == read(tmp_path / "broken", "metrics")["loss"]


def test_errors(options, folder, tmp_path):
    (tmp_path / "bad.parquet").write_text("no parquet")
    short = f"--validation_file {folder}/c.txt --max_eval_blocks 1"
    assert not unlike("pretrain", [*options, f"--output_dir {tmp_path}/out"], {
        "--interleave_probabilities 1": "--interleave_probabilities must be one for each --dataset_name, got",
        "--interleave_probabilities 1 -1": "--interleave_probabilities must be above 0, got",
        "--text_column body": "--text_column must be a column of .*a.parquet, one of text, other, got body",
        "--text_column other": "--text_column must be a column of text, got other with ",
        "--documents headings": "--documents must be rows or lines with --streaming, got headings",
        "--block_size 8000": "must have 2 blocks of 8000 tokens for validation, got 0",
        "--dataset_config_name one": "--dataset_config_name must be one for each --dataset_name",
        f"--block_size 8000 {short}": "validation text is",
        f"--block_size 2000 {short}": "train text is shorter",
        f"--dataset_name {folder}/a.parquet {folder}/c.txt": "--documents must be rows or lines for text files",
        f"--dataset_name {tmp_path}/bad.parquet {folder}/b.jsonl": "bad.parquet has no rows that can be read: ",
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
    mixed = Mixture(["generated"], [source], documents="rows", parts=8)
    stream, process, resident = TextStream(mixed, tokenizer, 128, False, buffer_size=1000), psutil.Process(), []
    for _ in stream.loader(32, 0, 10**9):
        read = sum(json.loads(state)["rows"]["read"] for state in stream.states if state)
        if read >= 20_000 * (len(resident) + 1):
            resident.append(process.memory_info().rss)
        if len(resident) == 10:
            break
    assert max(resident) < 1.05 * min(resident)
