"""Perplexity by length, of causal and masked models, equals a direct computation for any tokens in a pass."""

import functools
import json
import math
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from scipy import stats
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, ByT5Tokenizer, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from helpers.models import lively_language_model, seeded, slow, tiny_config
from helpers.scripts import SENTENCES, read, run_script, table_rows, write_text
from modeling_tnn import TnnForMaskedLM, evaluate_by_length, match_parameters, state_bytes_by_length
from modeling_tnn.data.text import tokenize, train_tokenizer
from modeling_tnn.tools.comparing import count_parameters, score_tokens
from tnn_programs.training import evaluate_lm, scoring
from tnn_programs.training.card_inputs import read_evaluation
from tnn_programs.training.scoring import bytes_until, hidden_tokens, score_masked

ENCLOSING, MASK = ([0], [2]), 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A TNN, a GPT-2 and a masked model of SKI, all untrained, with tokenizers, and a text."""
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    peer = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, n_positions=64, vocab_size=300))
    masked = seeded(TnnForMaskedLM, tiny_config(causal=False, tno_type="ski", vocab_size=300, ski_grid_length=24))
    for name, model in {"tnn": lively_language_model(vocab_size=300).float(), "gpt2": peer, "ski": masked}.items():
        model.save_pretrained(folder / name)
        tokenizer = train_tokenizer(Dataset.from_dict({"text": SENTENCES}), 300, masked=name == "ski")
        tokenizer.save_pretrained(folder / name)
    (folder / "tnn" / "training_args.json").write_text('{"block_size": 24}')
    write_text(folder / "text.txt", copies=20)
    return folder


def text_of(tokens: int) -> torch.Tensor:
    return torch.randint(300, (tokens,), generator=torch.Generator().manual_seed(0))


@functools.cache
def direct(model, tokens: int, length: int, stride: int) -> list[float]:
    """The definition, one prediction after the other: every token but the first, once, in the first row it is in."""
    nats, ids = [], text_of(tokens)
    for i in range(1, len(ids)):
        start = max(0, math.ceil((i + 1 - length) / stride)) * stride
        nats.append(-model(ids[None, start:i]).logits[0, -1].log_softmax(-1)[ids[i]].item())
    return nats


@pytest.mark.parametrize(
    "name, stride, tokens_per_pass", [("tnn", None, 10), *slow(("gpt2", 7, 10), ("tnn", 7, 1000))]
)
def test_definition(name, stride, tokens_per_pass, folder):
    """All lengths score the same tokens, for any length of the last row; a bin has those of as much context."""
    model = evaluate_lm.AutoModelForCausalLM.from_pretrained(folder / name).eval()
    for tokens, length in ((100, 11), (33, 11), (34, 33), (97, 33), *([(40, 2)] if stride is None else [])):
        nats = direct(model, tokens, length, stride or length - 1)
        result = score_tokens(model, text_of(tokens), length, stride, tokens_per_pass)
        assert len(result) == tokens - 1 and result.mean().item() == pytest.approx(sum(nats) / len(nats), rel=1e-5)
        if stride is None:
            bins = scoring.by_context(torch.tensor(nats), length)
            assert [bin["first"] for bin in bins] == [n for n in (1, 2, 4, 8, 16, 32) if n < length]
            for bin in bins:
                own = [loss for i, loss in enumerate(nats) if bin["first"] <= i % (length - 1) + 1 <= bin["last"]]
                assert bin["tokens"] == len(own) and bin["loss"] == pytest.approx(sum(own) / len(own), rel=1e-5)
            assert sum(bin["tokens"] for bin in bins) == tokens - 1 and bins[-1]["last"] == length - 1


def test_in_python():
    """Texts of a batch are scored on real tokens; a length beyond a text reads all of it. The state of `rtf` stays."""
    model, short = lively_language_model(tno_type="rtf", vocab_size=300), text_of(23)
    ids, mask = torch.stack([text_of(100), torch.nn.functional.pad(short, (77, 0))]), torch.ones(2, 100)
    mask[1, :77] = 0
    found = evaluate_by_length(model, [{"input_ids": ids, "attention_mask": mask}], [11, 64], tokens_per_pass=10)
    for length in (11, 64):
        nats = direct(model, 100, length, length - 1) + direct(model, 23, length, length - 1)
        assert found[length] == pytest.approx(sum(nats) / len(nats), rel=1e-7)
    whole = model(short[None], labels=short[None]).loss.item()
    assert evaluate_by_length(model, [short[None]], [23]) == pytest.approx({23: whole})
    with pytest.raises(ValueError, match="must be causal"):
        evaluate_by_length(seeded(TnnForMaskedLM, tiny_config(causal=False)), [ids], [2])
    for batches, lengths in (([ids], [1]), ([ids[:, :1]], [2]), ([ids], [])):
        with pytest.raises(ValueError, match="must"):
            evaluate_by_length(model, batches, lengths)
    (first, last), width = state_bytes_by_length(model, [64, 4096]), 2 * model.config.num_hidden_layers * 8
    assert first["state"] == last["state"] and last["transformer"] == 4096 * width * model.config.hidden_size
    peer = GPT2Config(n_embd=24, n_layer=2, n_head=2, vocab_size=300)
    matched = count_parameters(match_parameters(model.config, peer))
    assert matched == pytest.approx(count_parameters(peer), rel=0.05) != model.num_parameters()
    with pytest.raises(ValueError, match="`config` must allow .* parameters within 5%, got"):
        match_parameters(model.config, GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=300))


def test_definition_of_a_masked_model(tno_type="ski", tokens_per_pass=10):
    """Each hidden token alone, in its row with all hidden tokens of the row masked."""
    model = seeded(TnnForMaskedLM, tiny_config(causal=False, tno_type=tno_type, vocab_size=300)).eval()
    ids, hidden = text_of(61), hidden_tokens(61, 0.3, seed=1)
    row = torch.where(hidden, MASK, ids).tolist()
    for length in (3, 11, 33, 61, 63):
        losses, size = [], length - 2
        for i in hidden.nonzero()[:, 0].tolist():
            start = i // size * size
            logits = model(torch.tensor([[0, *row[start : start + size], 2]])).logits[0, 1 + i - start]
            losses.append(-logits.log_softmax(-1)[ids[i]].item())
        nats = score_masked(model, ids, hidden, length, MASK, ENCLOSING, tokens_per_pass)
        assert nats.tolist() == pytest.approx(losses, rel=1e-4)
    assert hidden_tokens(10_000, 0.15, seed=0).float().mean().item() == pytest.approx(0.15, abs=0.02)


def evaluate(models: str, output: Path, *more) -> list[dict]:
    run_script("evaluate_lm", f"--model_name_or_path {models} --output_dir {output}", *more)
    return read(output)["results"]


def test_poles_outside_the_unit_circle(folder, tmp_path, capsys, caplog):
    """A convolution needs no state: rows are read at once, with a warning. Lengths with a rising kernel are named."""
    fields = {"tno_type": "rtf", "rtf_constraint": None, "rtf_initializer": "zeros"}
    model = lively_language_model(vocab_size=300, **fields).float()
    with torch.no_grad():
        operator = model.model.layers[0].mixer.tno
        operator.denominator[:, 0] = -1.3  # a pole of radius 1.3
        operator.numerator.normal_()
    for one in (model, AutoTokenizer.from_pretrained(folder / "tnn")):
        one.save_pretrained(tmp_path / "rtf")
    options = f"--validation_file {folder}/text.txt --tokens_per_pass 10 --lengths 32 48 600"
    found = evaluate(tmp_path / "rtf", tmp_path / "out", options)
    assert [(one["length"], math.isfinite(one["loss"])) for one in found] == [(32, True), (48, True)]
    log = capsys.readouterr().err + caplog.text
    assert "Rows of 48 tokens are read at once" in log and "length 600 is left out. Layer 0, channel 0: a pole" in log


def test_interval():
    """That of a mean for documents of one size; none for one document."""
    totals = torch.rand(7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    low, high = stats.t.interval(0.95, 6, totals.mean() / 3, stats.sem(totals) / 3)
    assert scoring.interval(totals, torch.full((7,), 3.0)) == pytest.approx((high - low) / 2)
    assert scoring.interval(totals[:1], totals[:1]) is None
    # Where one model is the other one with a constant more per byte, the difference has no uncertainty.
    common = {"length": 8, "stride": None, "bytes_of_documents": [10.0, 20.0, 30.0]}
    results = [common | {"model": name, "bits_of_documents": own, "bits_per_byte": sum(own) / 60}
               for name, own in {"a": [5.0, 70.0, 40.0], "b": [10.0, 80.0, 55.0]}.items()]  # fmt: skip
    evaluate_lm.compare(results)
    assert "over_first" not in results[0] and results[1]["over_first"] == pytest.approx(0.5)
    assert results[1]["over_first_interval"] == pytest.approx(0, abs=1e-9)


TEXT = ["Ein schöner Tag – 日本語 🙂", "", "plain text", "  two  spaces é", "the end"]


def byte_level(texts: list[str]):
    return train_tokenizer(Dataset.from_dict({"text": texts}), 300)


def test_documents():
    """Bits and bytes of each document add up to those of the text; the last one may be read in part."""
    texts = {"text": ["Ein schöner", "Tag", "plain text", "", "the end"], "ends": [False, True, True, False, False]}
    tokenizer = byte_level(["a"])
    lines = tokenize(texts["text"], tokenizer, texts["ends"])
    count = sum(map(len, lines)) - 2
    documents = evaluate_lm.Documents(texts, lines, tokenizer, count)
    sizes = [len(b"Ein sch\xc3\xb6ner\nTag\n") - 1, len("plain text\n"), len("\nthe end\n") - 2]
    assert documents.bytes.tolist() == sizes
    nats = torch.full((count - 1,), math.log(2), dtype=torch.float64)
    assert documents.bits(nats).tolist() == pytest.approx([sizes[0] + 1, sizes[1] + 1, sizes[2]])  # and ends of texts
    shorter = evaluate_lm.Documents(texts, lines, tokenizer, 5)
    assert shorter.bytes.tolist() == [4] and shorter.owners.tolist() == [0] * 4


def test_bytes_of_byte_level_tokens():
    """Each of their letters is a byte; a count within a character has all of it."""
    tokenizer = byte_level(TEXT * 3)
    tokens = tokenize(TEXT, tokenizer)
    sizes = [len(token) for ids in tokens for token in tokenizer.convert_ids_to_tokens(ids)]
    text = "".join(f"{line}\n" for line in TEXT)
    ends = {len(text[:end].encode()) for end in range(len(text) + 1)}
    for count in range(len(sizes) + 1):
        exact = sum(sizes[:count])
        assert bytes_until(TEXT, tokens, tokenizer, count) == min(end for end in ends if end >= exact)


def test_bytes_of_other_tokens():
    """Characters between two words count for the second word, and those at the end of a line for the line.

    The text cannot be got back from words of letters without accents.
    """
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "eager": 1, "text": 2}, unk_token="[UNK]"))
    words.normalizer, words.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]")
    tokens = tokenize(TEXT, tokenizer)
    assert [len(ids) for ids in tokens] == [8, 0, 2, 3, 2]
    parts = ["Ein", " schöner", " Tag", " –", " 日", "本", "語", " 🙂\n"]
    parts += ["\nplain", " text\n", "  two", "  spaces", " é\n", "the", " end\n"]
    for count in range(16):
        assert bytes_until(TEXT, tokens, tokenizer, count) == len("".join(parts[:count]).encode())


def test_a_tokenizer_that_does_not_say_where_its_tokens_are():
    """Whole lines have their bytes without it."""
    tokenizer = ByT5Tokenizer()
    tokens = tokenize(TEXT, tokenizer)
    assert bytes_until(TEXT, tokens, tokenizer, sum(map(len, tokens))) == len("\n".join([*TEXT, ""]).encode())
    with pytest.raises(ValueError, match="must be fast for bits per byte, got ByT5Tok"):
        bytes_until(TEXT, tokens, tokenizer, 3)


def test_report(folder, tmp_path, capsys):
    evaluate(f"{folder}/tnn {folder}/gpt2", tmp_path, f"--validation_file {folder}/text.txt --max_tokens 400",
             "--lengths 16 64 128 100000 --stride 12")  # fmt: skip
    report, captured = read(tmp_path), capsys.readouterr()
    results, card = report["results"], read_evaluation(report)
    assert card["of"] == "the text text.txt" and len(card["rows"]) == sum(row["stride"] is None for row in results)
    by_key = {(Path(r["model"]).name, r["length"], r["stride"]): r for r in results}
    assert [key[1:] for key in by_key if key[0] == "tnn"] == [(n, s) for n in (16, 64, 128) for s in (None, 12)]
    assert {key[1] for key in by_key if key[0] == "gpt2"} == {16, 64}
    assert "length 100000 is left out, because the text has 400 tokens" in captured.err
    assert "length 128 is left out, because the model takes at most 64" in captured.err
    tokenizer = evaluate_lm.AutoTokenizer.from_pretrained(folder / "tnn")
    ids = [i for line in (folder / "text.txt").read_text().splitlines() for i in tokenizer(line + "\n")["input_ids"]]
    scored = len("".join(tokenizer.convert_ids_to_tokens(ids[1:400])))  # a letter is a byte
    for (name, *key), result in by_key.items():
        assert (result["tokens"], result["bytes"]) == (399, scored)
        assert result["trained_length"] == (24 if name == "tnn" else 64)
        assert result["perplexity"] == pytest.approx(math.exp(result["loss"]))
        assert result["bits_per_byte"] == pytest.approx(math.log2(result["perplexity"]) * 399 / scored, rel=1e-6)
        difference = result["bits_per_byte"] - by_key["tnn", *key]["bits_per_byte"]
        assert result.get("over_first", 0) == pytest.approx(difference) and (name == "tnn") != ("over_first" in result)
        assert ("by_context" in result) == (key[1] is None)
    assert (tmp_path / "perplexity.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "perplexity.md").read_text() in captured.out
    assert "bits per byte more than tnn" in captured.out and "| 64 to 127" in captured.out
    assert table_rows(captured.out)[0] == ["length", "tnn", "tnn, stride 12", "gpt2", "gpt2, stride 12"]
    (tmp_path / "training_args.json").write_text(json.dumps({"max_steps": 3}))  # of another program
    assert evaluate_lm.trained_length(str(tmp_path), tiny_config(max_position_embeddings=64)) == 64


def test_report_of_a_masked_model(folder, tmp_path, capsys):
    """Fields change at load: a grid that is stretched is another model on longer texts."""
    options = f"--objective mlm --validation_file {folder}/text.txt --lengths 16 64 100000 --max_tokens 400"
    options += " --mlm_probability 0.2 --seed 3"
    first = evaluate(folder / "ski", tmp_path / "0", options)
    second = evaluate(folder / "ski", tmp_path / "1", options, "--config_overrides ski_grid_length=64")
    hidden = int(hidden_tokens(400, 0.2, seed=3).sum())
    for result in first + second:
        assert result["tokens"] == hidden and result["perplexity"] == pytest.approx(math.exp(result["loss"]))
    assert [result["length"] for result in first] == [16, 64] and abs(first[1]["loss"] - second[1]["loss"]) > 1e-6
    written = capsys.readouterr().out
    assert table_rows(written)[0] == ["length", "ski"] and "perplexity of hidden tokens" in written
    assert (tmp_path / "0" / "perplexity.png").read_bytes().startswith(b"\x89PNG")
