"""Chats, which continue their cache from turn to turn, and text that is written in pieces.

Tokenizers that drop a first space or write characters as bytes: chats, `tnn generate`, the API and the page.
"""

import functools
import io
import itertools
import random

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from helpers.models import slow
from helpers.scripts import run, save_model
from modeling_tnn import TnnForCausalLM
from modeling_tnn.serving.request import Request
from tnn_programs.serving.pieces import Pieces
from tnn_programs.serving.writing import Conversation

GREEDY = {"max_new_tokens": 7, "do_sample": False, "eos_token_id": None}
LINES = ["The quick brown fox", "jumps over", "the lazy dog"]
TEMPLATE = "{% for m in messages %}<s>{{ m['role'] }} {{ m['content'] }}</s>{% endfor %}<s>"
# This one leaves out all but the last message: the past changes with every turn.
FORGETFUL = "<s>{{ messages[-1]['content'] }}"


@pytest.fixture(scope="module")
def plain_model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"), tno_type="rtf")


def test_turns_are_one_text(plain_model):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(plain_model), AutoTokenizer.from_pretrained(plain_model)
    for template, system in ((None, None), (FORGETFUL, None), (TEMPLATE, "Be brief.")):
        tokenizer.chat_template = template
        conversation = Conversation(model, tokenizer, system, GREEDY)
        for line in LINES:
            before = len(conversation.messages)
            text = conversation.answer(line)
            again = model.generate(conversation.ids[:, : -GREEDY["max_new_tokens"]], use_cache=False, **GREEDY)
            assert torch.equal(again, conversation.ids)
            assert [message["content"] for message in conversation.messages[before:]] == [line, text]
    assert "system Be brief." in tokenizer.decode(conversation.ids[0])


def test_program(plain_model, monkeypatch):
    """An empty line ends it. How to use it is said at the start, beside the text and not in it."""
    for temperature in (0, 0.7):
        monkeypatch.setattr("sys.stdin", io.StringIO("The quick\n/new\nbrown fox\n\nnot read\n"))
        given = f"--model_name_or_path {plain_model} --chat --max_new_tokens 5 --temperature {temperature}"
        done = run("generate", given)
        assert len(done.stdout.strip()) > 5
        assert done.stderr.count("plain text, which it continues. /new starts anew, an empty line") == 1


REFUSED = [
    ("--temperature -1", "Hello", "`temperature` (=-1.0) has to be a strictly positive float"),
    ("--num_beams 2", "Hello", "`streamer` cannot be used with beam search"),
    # As Python reads them from a terminal or a command line that is not UTF-8.
    ("", "a\udcff", "must be text in UTF-8, got 'a\\udcff'"),
    # The model would never read it.
    ("--system 'Be brief.'", "Hello", "--system must be given with a tokenizer that has a chat template"),
]


def test_refused(plain_model, monkeypatch):
    for options, line, message in REFUSED:
        monkeypatch.setattr("sys.stdin", io.StringIO(f"{line}\n"))
        done = run("generate", f"--model_name_or_path {plain_model} --chat {options}", check=False)
        assert done.returncode == 2 and message in done.stderr, options


SPECIAL = ["<unk>", "<s>", "</s>", "<|stop▁here|>"]
WORDS = ["▁the", "▁cat", "▁", "s", "a", ".", "\n", "▁é"]
VOCABULARY = {token: id for id, token in enumerate([*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS])}


def llama() -> Tokenizer:
    """As that of Llama 2, Mistral and Gemma."""
    tokenizer = Tokenizer(models.BPE(VOCABULARY, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    last = [decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), *last])
    return tokenizer


def unigram() -> Tokenizer:
    """As those of T5 and of sentencepiece's usual models, with bytes."""
    scores = [(token, -2.0 if token in WORDS else -9.0) for token in VOCABULARY]
    tokenizer = Tokenizer(models.Unigram(scores, 0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return tokenizer


@pytest.fixture(scope="module", params=[llama, unigram])
def tokenizer(request):
    built = request.param()
    built.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=built, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@pytest.fixture(scope="module")
def folder(tokenizer, tmp_path_factory):
    folder = save_model(tmp_path_factory.mktemp("model"), tno_type="rtf")
    tokenizer.save_pretrained(folder)
    return folder


def ids(*tokens: str) -> list[int]:
    return [VOCABULARY[token] for token in tokens]


def bytes_of(text: str) -> list[int]:
    return ids(*(f"<0x{byte:02X}>" for byte in text.encode()))


PROMPT, STOP = ids("▁the", "▁cat"), ids("<|stop▁here|>")
# Tokens of an answer -> its text.
ANSWERS = {
    "first space": (ids("▁cat", "s", "▁the"), " cats the"),
    "bytes of a character": (ids("▁cat") + bytes_of("€") + ids("▁the"), " cat€ the"),
    "bytes of two": (bytes_of("€漢") + ids("s"), "€漢s"),
    "a byte of none": (ids("<0x82>", "s", "▁the"), "\ufffds the"),
    "a byte after a character": (bytes_of("€") + ids("<0x82>", "s"), "€\ufffds"),
    "an end within a character": (ids("▁cat") + bytes_of("€")[:2], " cat\ufffd\ufffd"),
    "a space after a line": (ids("s", "\n", "▁the", "\n", "▁", "▁cat"), "s\n the\n  cat"),
    "special tokens within": (ids("▁cat") + STOP + ids("▁the"), " cat the"),
}


def write(monkeypatch, answer: list[int]):
    """Have models write these tokens again and again."""
    original, tokens = TnnForCausalLM.forward, itertools.cycle(answer)

    @functools.wraps(original)  # `generate` looks at the arguments
    def forward(*given, **options):
        output = original(*given, **options)
        output.logits[:] = -9.0
        output.logits[..., next(tokens)] = 9.0
        return output

    monkeypatch.setattr(TnnForCausalLM, "forward", forward)


def written(tokenizer, prompt: list[int], answer: list[int]) -> str:
    pieces = Pieces(tokenizer, prompt)
    return "".join(map(pieces.add, answer)) + pieces.finish()


def test_pieces(tokenizer):
    """After any prompt, also one that ends within a character."""
    for answer, text in ANSWERS.values():
        for prompt in (PROMPT, ids("<s>", "▁the"), ids("▁the", "\n"), PROMPT + STOP, PROMPT + bytes_of("€")):
            assert written(tokenizer, prompt, answer) == text
        assert written(tokenizer, PROMPT + bytes_of("€")[:1], [*bytes_of("€")[1:], *answer]) == "€" + text


def test_any_tokens(tokenizer):
    """Nothing raises, and without bytes the text is that of all tokens after that of the prompt."""
    for seed in range(200):
        first = 260 if seed % 2 else 0
        tokens = random.Random(seed).choices(range(first, len(VOCABULARY)), k=24)
        found = written(tokenizer, PROMPT, tokens)
        before, whole = (tokenizer.decode(part, skip_special_tokens=True) for part in (PROMPT, PROMPT + tokens))
        assert not first or found == whole[len(before) :]


def test_chat_and_generate(folder, tokenizer, monkeypatch, capsys):
    model = AutoModelForCausalLM.from_pretrained(folder)
    for answer, text in ANSWERS.values():
        with monkeypatch.context() as patch:
            write(patch, answer)
            options = {"max_new_tokens": len(answer), "do_sample": False, "eos_token_id": None}
            assert Conversation(model, tokenizer, None, options).answer("the cat") == text
            assert capsys.readouterr().out == f"{text}\n"
    answer = [token for answer, _ in ANSWERS.values() for token in answer]
    write(monkeypatch, [*answer[-2:], *answer[:-2]])  # two passes try the model when it is loaded
    monkeypatch.setenv("TNN_SELF_CHECK", "0")  # it is another model now
    done = run("generate.py", f"--model_name_or_path {folder} --prompt 'the cat' --do_sample false",
               f"--eos_token_id null --max_new_tokens {len(answer)}")  # fmt: skip
    assert done.stdout.startswith(f"the cat{''.join(text for _, text in ANSWERS.values())}\n")


@pytest.fixture(scope="module")
def service(folder):
    for package in ("fastapi", "uvicorn", "prometheus_client"):
        pytest.importorskip(package)
    from helpers.api_server import serving

    with serving(folder) as service:
        yield service


def asked(service, answer: list[int], stream: bool, monkeypatch, **fields) -> tuple[str, str]:
    """The text of the API if the model writes these tokens, and why it has ended."""
    openai = pytest.importorskip("openai")
    monkeypatch.setattr(Request, "choose", lambda request, logits, likeliest: answer[len(request.tokens)])
    given = {"model": service.name, "prompt": "the cat", "max_tokens": len(answer), "stream": stream} | fields
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0) as client:
        done = client.completions.create(**given)
        choices = [chunk.choices[0] for chunk in done] if stream else done.choices
        return "".join(choice.text for choice in choices), choices[-1].finish_reason


@pytest.mark.parametrize("stream", [True, *slow(False)])
def test_api(service, stream, monkeypatch):
    """All at once or as a stream; the text ends before a stop, which a special token may part."""
    for answer, text in ANSWERS.values():
        assert asked(service, answer, stream, monkeypatch) == (text, "length")
    monkeypatch.setattr(service.engine.scheduler.model.generation_config, "eos_token_id", None)
    plain, stopped = ids("▁cat", "s", "▁the", "</s>", "<0x82>", "s"), ids("▁cat", "<|stop▁here|>", "s", "▁the")
    for stop, answer, text in (
        ("<|stop▁here|>", stopped, " cat"),  # whose text some decoders write with a space
        (["never", "<|stop▁here|>"], stopped, " cat"),
        ("</s>", plain, " cats the"),
        ("cats", stopped, " "),  # what a special token parts
        (" the", plain, " cats"),
        ("\ufffd", ids("▁cat", "s", "▁the", "<0x82>"), " cats the"),
    ):
        assert asked(service, answer, stream, monkeypatch, stop=stop) == (text, "stop"), stop
