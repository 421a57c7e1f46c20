"""Where documents end in what a language model is trained and evaluated on."""

import gzip
import json

import pytest
from datasets import Dataset
from transformers import AutoTokenizer, pipeline

from helpers.models import lively_language_model
from helpers.scripts import ROOT, SENTENCES, read, run_script, write_config, write_text
from tnn_scripts.common.terminal import read_lines
from tnn_scripts.data.document_ends import document_ends
from tnn_scripts.data.files import check_file
from tnn_scripts.data.sources import open_source
from tnn_scripts.data.text import load_corpus, load_texts, pack, tokenize, train_tokenizer
from tnn_scripts.generate import read_prompts

ARTICLES = ["", " = Lobster = \n", "", " It swims where a \n", " = b = \n", "", " = Pike = \n", ""]
WIKITEXT = ROOT.parent / "shared" / "data" / "wikitext"


def ended(texts: Dataset, tokenizer) -> list[str]:
    """The documents of the blocks of one token each."""
    ids = [block[0] for block in pack(texts, tokenizer, 1)["input_ids"]]
    return tokenizer.decode(ids).split("</s>")


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(Dataset.from_dict({"text": SENTENCES}), 300)


def test_ends():
    rows = Dataset.from_dict({"text": ARTICLES, "book": list("aaabbbbb"), "part": [1, 1, 1, 1, 1, 2, 2, 2]})
    for documents, ends in (
        ("rows", [1] * 8),
        ("lines", [0] * 8),
        ("headings", [0, 0, 0, 0, 0, 1, 0, 1]),
        ("book", [0, 0, 1, 0, 0, 0, 0, 1]),
        ("book,part", [0, 0, 1, 0, 1, 0, 0, 1]),
        (None, [0, 0, 0, 0, 0, 1, 0, 1]),
    ):
        assert document_ends(rows, "text", documents).tolist() == [bool(end) for end in ends]
    with pytest.raises(ValueError, match=r"--documents must be rows, lines, headings or columns among .*, got books"):
        document_ends(rows, "text", "books")


def test_ends_by_source(tmp_path, tokenizer):
    """Rows of a table are documents, the lines of a text file are not."""
    Dataset.from_dict({"text": SENTENCES[:2]}).to_json(tmp_path / "rows.jsonl")
    write_text(tmp_path / "lines.txt", copies=2)
    documents = [sentence + "\n" for sentence in SENTENCES[:2]]
    assert ended(load_texts(str(tmp_path / "rows.jsonl")), tokenizer) == [*documents, ""]
    assert ended(load_texts(str(tmp_path / "rows.jsonl"), documents="lines"), tokenizer) == ["".join(documents)]
    assert len(ended(load_texts(str(tmp_path / "lines.txt")), tokenizer)) == 1
    both = load_corpus(str(tmp_path / "rows.jsonl"), validation_file=str(tmp_path / "lines.txt"), documents="rows")
    assert [len(ended(both[split], tokenizer)) for split in ("train", "validation")] == [3, len(SENTENCES) * 2]


def test_the_demo_corpus(tokenizer):
    """The chapters of the King James Bible; where its last twentieth is held out no chapter ends."""
    corpus = load_corpus()
    assert sum(map(sum, (corpus[split]["ends"] for split in corpus))) == 1189
    assert sum(len(text) for split in corpus.values() for text in split["text"]) > 4_000_000
    assert len(corpus["validation"]) == pytest.approx(0.05 * 31_103, rel=0.01)
    first = corpus["train"].select(range(40))
    assert [i for i, end in enumerate(first["ends"]) if end] == [30]
    chapters = ended(first, tokenizer)
    assert chapters[0].startswith("In the beginning")
    assert chapters[1].startswith("Thus the heavens and the earth were finished")
    assert not corpus["train"][-1]["ends"] and corpus["validation"][-1]["ends"]


@pytest.mark.skipif(not WIKITEXT.is_dir(), reason="no shared data")
def test_articles_of_wikitext():
    """As many as WikiText-2 is said to have."""
    for split, articles in (("train", 600), ("validation", 60), ("test", 60)):
        assert sum(load_texts(str(WIKITEXT), "wikitext-2-v1", split)["ends"]) == articles


@pytest.mark.parametrize(
    "rows, block_size, enclose", [(1, 17, False), (7, 17, True), (100, 900, True), (10_000, 900, False)]
)
def test_no_text_is_lost_between_blocks(rows, block_size, enclose, monkeypatch, caplog):
    """Whatever number of rows is tokenized at once; what fills no block at the end is said, from the cache too."""
    texts = Dataset.from_dict({"text": SENTENCES * 100, "ends": [True, False, True] * 100})
    tokenizer = train_tokenizer(texts, 300, masked=True)
    monkeypatch.setattr("tnn_scripts.data.text.ROWS_AT_ONCE", rows)
    lines = tokenize(texts["text"][:], tokenizer, None if enclose else texts["ends"][:])
    expected, extra = [token for line in lines for token in line], 1 if enclose else 0
    for _ in range(2):
        caplog.clear()
        with caplog.at_level("INFO"):
            blocks = pack(texts, tokenizer, block_size, enclose, "validation")["input_ids"]
        assert {len(block) for block in blocks} == {block_size}
        found = [token for block in blocks for token in block[extra : block_size - extra]]
        left = len(expected) - len(found)
        assert found == expected[: len(found)] and 0 < left < block_size - 2 * extra
        assert f"the last {left} tokens of the validation text fill no block of {block_size}: left out" in caplog.text


def test_no_end_without_a_token():
    tokenizer = train_tokenizer(Dataset.from_dict({"text": SENTENCES}), 300)
    tokenizer.eos_token = None
    assert tokenize(["fox"], tokenizer, [True]) == tokenize(["fox"], tokenizer)


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


def test_padding_side(tmp_path):
    """Generation in batches needs the padding of a causal model before the text, whatever its tokenizer had."""
    for masked, side in ((False, "left"), (True, "right")):
        folder = tmp_path / side
        train_tokenizer(Dataset.from_dict({"text": SENTENCES}), 300, masked).save_pretrained(folder)
        assert AutoTokenizer.from_pretrained(folder).padding_side == side
    config, text = write_config(tmp_path / "config"), write_text(tmp_path / "text.txt", copies=60)
    run_script("pretrain", f"--config_name {config} --train_file {text} --tokenizer_name {folder} --max_steps 1",
               f"--output_dir {tmp_path}/out")  # fmt: skip
    assert AutoTokenizer.from_pretrained(tmp_path / "out").padding_side == "left"


def test_batches_of_a_pipeline(tokenizer):
    """With the tokenizer as it is trained: the texts of prompts of different lengths are those of each alone."""
    model = lively_language_model(vocab_size=300)
    generate = pipeline("text-generation", model=model, tokenizer=tokenizer)
    prompts, options = ["The quick brown fox", "A", "Pack my box"], {"max_new_tokens": 12, "do_sample": False}
    assert generate(prompts, batch_size=3, **options) == [generate(prompt, **options) for prompt in prompts]


def test_tables_and_suffixes(tmp_path):
    """An empty cell is an empty text; a column of numbers is refused, as are tables with another separator."""
    (tmp_path / "rows.csv").write_text("text,stars\none,1\n,2\nthree,3\n")
    texts = load_texts(str(tmp_path / "rows.csv"))
    assert texts["text"][:] == ["one", "", "three"]
    with pytest.raises(ValueError, match=r"--text_column must be a column of text, got stars of .*int64"):
        load_texts(str(tmp_path / "rows.csv"), text_column="stars")
    rows = "".join(json.dumps({"text": sentence}) + "\n" for sentence in SENTENCES)
    (tmp_path / "ROWS.JSONL").write_text(rows)
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(rows.encode()))
    (tmp_path / "lines.txt.gz").write_bytes(gzip.compress("".join(f"{line}\n" for line in SENTENCES).encode()))
    for name in ("ROWS.JSONL", "rows.jsonl.gz", "lines.txt.gz"):
        check_file(str(tmp_path / name))
        assert load_texts(str(tmp_path / name))["text"][:] == list(SENTENCES), name
    (tmp_path / "rows.tsv").write_text("text\tlabel\nx\t1\n")
    (tmp_path / "line.txt").write_text("one line alone")
    for name, message in (("rows.tsv", r"Tables must be .csv, .json, .jsonl or .parquet files, got .*rows.tsv"),
                          ("line.txt", "at least two rows unless --validation_file is given, got one")):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            load_corpus(str(tmp_path / name))


def test_a_folder_is_a_source(tmp_path):
    Dataset.from_dict({"text": SENTENCES, "id": [1, 2, 3]}).to_parquet(tmp_path / "train.parquet")
    Dataset.from_dict({"text": SENTENCES[:1], "id": [4]}).to_parquet(tmp_path / "validation.parquet")
    assert load_corpus(str(tmp_path / "train.parquet"), text_column="text")["train"]["text"] == SENTENCES[:2]
    folder = load_corpus(str(tmp_path))
    assert folder["train"]["text"] == SENTENCES and folder["validation"]["text"] == SENTENCES[:1]
    with pytest.raises(ValueError, match="--text_column must be .* text, id, got sentence"):
        load_corpus(str(tmp_path), text_column="sentence")


@pytest.mark.parametrize("kind", ["prompts", "gzip", "input", "text", "stream", "csv", "jsonl"])
def test_lines_of_a_file(kind, tmp_path, monkeypatch):
    """A line ends at a line break alone, and a byte order mark is none of its text, whatever reads it."""
    expected = ["one\u2028more\x85a\x0cb\x1cc", " two", "three"]
    content = {
        "csv": "text\n" + "\n".join(expected),
        "jsonl": "\n".join(json.dumps({"text": line}, ensure_ascii=False) for line in expected),
    }.get(kind, "\r\n".join(expected) + "\n")
    suffix = {"csv": ".csv", "jsonl": ".jsonl", "gzip": ".txt.gz"}.get(kind, ".txt")
    file = tmp_path / f"lines{suffix}"
    (gzip.open if kind == "gzip" else open)(file, "wb").write(("\ufeff" + content).encode())
    if kind in ("prompts", "gzip"):
        found = read_prompts(file)
    elif kind == "input":
        with file.open(encoding="utf-8") as opened:
            monkeypatch.setattr("sys.stdin", opened)
            found = list(read_lines())
    elif kind == "stream":
        found = [row["text"] for row in open_source(str(file))["train"]]
    else:
        found = load_texts(str(file))["text"][:]
    assert found == expected
