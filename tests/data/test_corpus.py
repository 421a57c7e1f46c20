"""Where documents end in what a language model is trained and evaluated on."""

import gzip
import json
import os

import pytest
from datasets import Dataset
from transformers import AutoTokenizer, pipeline

from helpers.models import lively_language_model
from helpers.scripts import SENTENCES, read, run_script, write_config, write_text
from modeling_tnn.data.files import read_lines_of
from modeling_tnn.data.text import pack, tokenize, train_tokenizer
from tnn_programs.cli.text_files import read_lines
from tnn_programs.data.corpus import document_ends, load_corpus, load_texts
from tnn_programs.data.mixture import Mixture, open_source

ARTICLES = ["", " = Lobster = \n", "", " It swims where a \n", " = b = \n", "", " = Pike = \n", ""]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(Dataset.from_dict({"text": SENTENCES}), 300)


def test_ends():
    rows = Dataset.from_dict({"text": ARTICLES, "book": list("aaabbbbb"), "part": [1, 1, 1, 1, 1, 2, 2, 2]})
    for documents, ends in (("rows", range(8)), ("lines", ()), ("headings", (5, 7)), ("book", (2, 7)),
                            ("book,part", (2, 4, 7)), (None, (5, 7))):  # fmt: skip
        assert document_ends(rows, "text", documents).nonzero()[0].tolist() == list(ends)
    with pytest.raises(ValueError, match=r"--documents must be rows, lines, headings or some of .*, got books"):
        document_ends(rows, "text", "books")


def test_ends_by_source(tmp_path, tokenizer):
    """Rows of a table are documents, the lines of a text file are not; the blocks have an end of text after each."""
    Dataset.from_dict({"text": SENTENCES[:2]}).to_json(tmp_path / "rows.jsonl")
    rows, lines = str(tmp_path / "rows.jsonl"), str(write_text(tmp_path / "lines.txt", copies=2))
    assert sum(load_texts(rows, documents="lines")["ends"]) == sum(load_texts(lines)["ends"]) == 0
    ids = [block[0] for block in pack(load_texts(rows), tokenizer, 1)["input_ids"]]
    assert tokenizer.decode(ids) == "".join(f"{sentence}\n</s>" for sentence in SENTENCES[:2])
    both = load_corpus(rows, validation_file=lines, documents="rows")
    assert [sum(both[split]["ends"]) for split in ("train", "validation")] == [2, len(SENTENCES) * 2 - 1]
    tokenizer.eos_token, before = None, tokenizer.eos_token
    assert tokenize(["fox"], tokenizer, [True]) == tokenize(["fox"], tokenizer)
    tokenizer.eos_token = before


@pytest.mark.slow
def test_the_demo_corpus():
    """The chapters of the King James Bible; where its last twentieth is held out no chapter ends."""
    corpus = load_corpus()
    assert sum(map(sum, (corpus[split]["ends"] for split in corpus))) == 1189
    assert len(corpus["validation"]) == pytest.approx(0.05 * 31_103, rel=0.01)
    assert [i for i, end in enumerate(corpus["train"][:40]["ends"]) if end] == [30]
    assert corpus["train"][31]["text"].startswith("Thus the heavens and the earth were finished")
    assert not corpus["train"][-1]["ends"] and corpus["validation"][-1]["ends"]


@pytest.mark.parametrize("rows, block_size, enclose", [(1, 17, False), (7, 17, True), (10_000, 900, False)])
def test_no_text_is_lost_between_blocks(rows, block_size, enclose, monkeypatch, caplog):
    """Whatever number of rows is tokenized at once; what fills no block at the end is said."""
    texts = Dataset.from_dict({"text": SENTENCES * 100, "ends": [True, False, True] * 100})
    tokenizer = train_tokenizer(texts, 300, masked=True)
    monkeypatch.setattr("modeling_tnn.data.text.ROWS_AT_ONCE", rows)
    lines = tokenize(texts["text"][:], tokenizer, None if enclose else texts["ends"][:])
    expected, extra = [token for line in lines for token in line], 1 if enclose else 0
    with caplog.at_level("INFO"):
        blocks = pack(texts, tokenizer, block_size, enclose, "validation")["input_ids"]
    assert {len(block) for block in blocks} == {block_size}
    found = [token for block in blocks for token in block[extra : block_size - extra]]
    left = len(expected) - len(found)
    assert found == expected[: len(found)] and 0 < left < block_size - 2 * extra
    assert f"the last {left} tokens of the validation text fill no block of {block_size}: left out" in caplog.text


@pytest.mark.slow
def test_a_pretrained_model_ends(tmp_path):
    """Documents of one sentence: the model learns where they end, generates that, and is evaluated on it."""
    rows = tmp_path / "rows.jsonl"
    Dataset.from_dict({"text": SENTENCES[:2] * 200}).to_json(rows)
    config, out = write_config(tmp_path / "config", hidden_dropout_prob=0.0), tmp_path / "out"
    options = [f"--config_name {config} --train_file {rows} --max_steps 60 --learning_rate 0.01 --output_dir {out}"]
    run_script("pretrain", *options, "--checkpointing_steps 60")
    generate = pipeline("text-generation", model=str(out))
    texts = generate(["Pack my", "The quick brown"], batch_size=2, do_sample=False, max_new_tokens=60)
    assert [text[0]["generated_text"] for text in texts] == [f"{SENTENCES[1]}\n", f"{SENTENCES[0]}\n"]
    found = []
    for given in ([], ["--documents lines"]):
        run_script("evaluate_lm", f"--model_name_or_path {out} --validation_file {rows} --lengths 64", *given,
                   f"--output_dir {tmp_path}/figures")  # fmt: skip
        found.append(read(tmp_path / "figures")["results"][0]["perplexity"])
    assert found[1] > 1.3 * found[0]
    with pytest.raises(SystemExit, match="another run.\n  documents must be None, got lines\n  data must be "):
        run_script("pretrain", *options, "--max_steps 62 --documents lines --resume_from_checkpoint latest")


def test_padding_side(tmp_path, tokenizer):
    """Generation in batches needs the padding of a causal model before the text, whatever its tokenizer had."""
    masked = train_tokenizer(Dataset.from_dict({"text": SENTENCES}), 300, masked=True)
    masked.save_pretrained(tmp_path / "tokenizer")
    assert (tokenizer.padding_side, masked.padding_side) == ("left", "right")
    config, text = write_config(tmp_path / "config"), write_text(tmp_path / "text.txt", copies=60)
    run_script("pretrain", f"--config_name {config} --train_file {text} --tokenizer_name {tmp_path}/tokenizer",
               f"--max_steps 1 --output_dir {tmp_path}/out")  # fmt: skip
    assert AutoTokenizer.from_pretrained(tmp_path / "out").padding_side == "left"
    generate = pipeline("text-generation", model=lively_language_model(vocab_size=300), tokenizer=tokenizer)
    prompts, options = ["The quick brown fox", "A", "Pack my box"], {"max_new_tokens": 12, "do_sample": False}
    assert generate(prompts, batch_size=3, **options) == [generate(prompt, **options) for prompt in prompts]


def test_tables_suffixes_and_folders(tmp_path):
    """An empty cell is an empty text; a column of numbers is refused, as are tables with another separator."""
    rows = "".join(json.dumps({"text": sentence}) + "\n" for sentence in SENTENCES).encode()
    lines = "".join(f"{sentence}\n" for sentence in SENTENCES).encode()
    for name, content in {"rows.csv": b"text,stars\none,1\n,2\nthree,3\n", "rows.tsv": b"text\tlabel\nx\t1\n",
                          "rows.fastq": b"@a\nACGT\n",
                          "line.txt": b"one line alone", "ROWS.JSONL": rows, "rows.jsonl.gz": gzip.compress(rows),
                          "lines.txt.gz": gzip.compress(lines)}.items():  # fmt: skip
        (tmp_path / name).write_bytes(content)
    assert load_texts(str(tmp_path / "rows.csv"))["text"][:] == ["one", "", "three"]
    (tmp_path / "rows[1].csv").write_text("text\nNone\nNA\nnan\n")
    (tmp_path / "rows1.csv").write_text("text\nwrong\n")
    assert load_texts(str(tmp_path / "rows[1].csv"))["text"][:] == ["None", "NA", "nan"]
    for name in ("ROWS.JSONL", "rows.jsonl.gz", "lines.txt.gz"):
        assert load_texts(str(tmp_path / name))["text"][:] == list(SENTENCES), name
    folder = tmp_path / "folder"
    for split in ("train", "validation"):
        Dataset.from_dict({"text": [f"{split} {i}" for i in range(3)], "id": [1, 2, 3]}).to_parquet(
            folder / f"{split}.parquet"
        )
    found = load_corpus(str(folder))
    assert {split: found[split][0]["text"] for split in found} == {"train": "train 0", "validation": "validation 0"}
    assert load_corpus(str(folder / "train.parquet"))["train"]["text"] == ["train 0", "train 1"]
    for name, options, message in (
        ("rows.csv", {"text_column": "stars"}, r"--text_column must be a column of text, got stars of .*int64"),
        ("rows.fastq", {}, r"Sequences must be FASTA files, got .*rows.fastq"),
        ("rows.tsv", {}, r"Tables must be .csv, .json, .jsonl or .parquet files, got .*rows.tsv"),
        ("line.txt", {}, "at least two rows unless --validation_file is given, got one"),
        ("folder", {"text_column": "sentence"}, "--text_column must be .* text, id, got sentence"),
    ):
        with pytest.raises(ValueError, match=message):
            load_corpus(str(tmp_path / name), **options)


DEEP = '{"text": "a", "x": ' + "[" * 100_000 + "]" * 100_000 + "}"
LINES = "".join(f"{number**9} a\n" for number in range(2000)).encode()


@pytest.mark.parametrize("way", ["file", "folder", "stream"])
@pytest.mark.parametrize("name, content, message", [
    ("a.csv", "text\nIn the beginning, God created\n", "Line 2 of .*a.csv must .* got 2 fields, .* has 1"),
    ("a.csv", "id,text\n1,hello,world\n", "Line 2 of .*a.csv .* got 3 fields, .* has 2"),
    ("a.csv", "id,text\n1,hello\n\n2\n", "Line 4 of .*a.csv .* got 1 fields, .* has 2"),
    ("a.csv", "\ufefftext,text\na,b\n", "Line 1 of .*a.csv .* got two columns with the name 'text'"),
    ("a.csv", 'text,id\n"a\nb",1\n"c,2\nd,3\n', "Line 4 of .*a.csv .* got unexpected end"),
    ("a.csv", 'text\n"Yes" he said\n', "Line 2 of .*a.csv .* got ',' expected"),
    ("a.jsonl", '{"text": "a"}\n{"txt": "b"}\n', "Row 2 of .* has no text|got text with None"),
    ("a.jsonl", f'{{"text": "]]"}}\n{DEEP}\n', "Line 2 of .*a.jsonl must have JSON of at most 60 levels"),
    ("a.json", DEEP.replace("[", "[\n"), "Line 60 of .*a.json must have JSON of at most 60 levels"),
    ("a.txt.gz", gzip.compress(LINES)[:-900], "a.txt.gz is not text in UTF-8: Compressed file ended"),
    ("a.txt.gz", gzip.compress(b"\0" * 2**26 + LINES), "a.txt.gz must be at most 200 times as large"),
], ids=range(11))  # fmt: skip
def test_text_is_not_lost_without_a_word(way, name, content, message, tmp_path):
    """Nor the process."""
    file = tmp_path / "texts" / name
    file.parent.mkdir()
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message):
        if way == "stream":
            mixed = Mixture([name], [open_source(str(file))["train"]])
            list(mixed.texts_of(mixed.rows_of(0, 0)))
        else:
            load_texts(str(file if way == "file" else file.parent), split="train")


def test_a_stream_is_damaged_beyond_what_is_checked(tmp_path, monkeypatch):
    monkeypatch.setattr("tnn_programs.cli.text_files.CHECKED_OF_STREAM", 1000)
    for name, content in {
        "a.txt.gz": gzip.compress(LINES * 400)[:-900],
        "a.csv": b"text\n" + b"a\n" * 20_000 + b"b,c\n",
    }.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=f"{name}.*(cannot be read|has no rows that can be read): "):
            mixed = Mixture([name], [open_source(str(tmp_path / name))["train"]])
            list(mixed.texts_of(mixed.rows_of(0, 0)))


def test_a_file_that_is_changed_in_place(tmp_path):
    """With the size and the time that it had."""
    file = tmp_path / "a.txt"
    for text in ("one", "two"):
        file.write_text(text)
        os.utime(file, (1, 1))
        assert load_texts(str(file))["text"][:] == [text]


@pytest.mark.parametrize("kind", ["prompts", "gzip", "input", "text", "stream", "csv", "jsonl"])
def test_lines_of_a_file(kind, tmp_path, monkeypatch):
    """A line ends at a line break alone, and a byte order mark is none of its text, whatever reads it."""
    expected = ["one\u2028more\x85a\x0cb\x1cc", " two", "three"]
    content = {
        "csv": "text\n" + "\n".join(expected),
        "jsonl": "\n".join(json.dumps({"text": line}, ensure_ascii=False) for line in expected),
    }.get(kind, "\r\n".join(expected) + "\n")
    file = tmp_path / ("lines" + {"csv": ".csv", "jsonl": ".jsonl", "gzip": ".txt.gz"}.get(kind, ".txt"))
    (gzip.open if kind == "gzip" else open)(file, "wb").write(("\ufeff" + content).encode())
    if kind == "input":
        with file.open(encoding="utf-8") as opened:
            monkeypatch.setattr("sys.stdin", opened)
            found = list(read_lines())
    elif kind == "stream":
        found = [row["text"] for row in open_source(str(file))["train"]]
    else:
        found = read_lines_of(str(file)) if kind in ("prompts", "gzip") else load_texts(str(file))["text"][:]
    assert found == expected
