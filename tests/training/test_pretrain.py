"""Pretraining: what it saves, and that steps do not depend on how they are computed."""

import dataclasses
import math
import re
import shutil

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer, GPT2Config, set_seed

from helpers.hybrids import HYBRIDS
from helpers.mixers import MIXED
from helpers.models import image_config, seeded, slow, tiny_config
from helpers.scripts import assert_same_weights, read, run_script, tree, weights, words, write_config, write_text
from modeling_tnn import (
    TnnConfig,
    TnnForCausalLM,
    TnnForImageClassification,
    TnnForMaskedLM,
    TnnForSequenceClassification,
    TnnForTimeSeriesPrediction,
    TnnForTokenClassification,
    find_unstable,
)
from modeling_tnn.data.blocks import BlockStream
from modeling_tnn.data.text import pack, train_tokenizer
from tnn_programs.cli.runs import check_same_run, describe_run
from tnn_programs.cli.training_arguments import PretrainArguments
from tnn_programs.data.corpus import load_corpus, workers_for
from tnn_programs.training import passes
from tnn_programs.training.costs import flops_of_token
from tnn_programs.training.passes import count_targets, summed_loss, token_losses


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


@pytest.fixture
def options(text, tmp_path):
    """The options of a short causal run; later options override them."""
    config = write_config(tmp_path / "config")
    return words(f"--config_name {config} --train_file {text} --output_dir {tmp_path}/out --max_steps 8",
                 "--learning_rate 0.01 --per_device_train_batch_size 4")  # fmt: skip


@pytest.fixture
def pretrain(options):
    """Call the program with more options, which are returned."""
    return lambda *more: run_script("pretrain", *options, *more)


def save_gpt2(folder):
    GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=32).save_pretrained(folder)


@pytest.mark.parametrize("kind", ["mlm", *slow("gpt2")])
def test_model_tokenizer_arguments_and_figures_are_saved(kind, pretrain, tmp_path):
    """Best model and checkpoints load as any model does."""
    output, masked = tmp_path / "out", kind == "mlm"
    more = "--objective mlm --config_overrides causal=false --do_lower_case" if masked else "--vocab_size 300"
    if not masked:
        save_gpt2(tmp_path / "config")
    pretrain(more, "--max_steps 24 --eval_steps 8 --checkpointing_steps 6 --save_total_limit 2",
             "--gradient_checkpointing --lr_scheduler_type inverse_sqrt")  # fmt: skip
    metrics = read(output, "metrics")
    assert metrics["perplexity_before"] > 200 > metrics["perplexity"] == metrics["evaluations"][-1]["perplexity"]
    assert [evaluation["step"] for evaluation in metrics["evaluations"]] == [8, 16, 24]
    assert metrics["tokens"] == 24 * 4 * 32 and metrics["tokens_per_second"] > 0
    assert metrics["flops_per_second"] > 0 and metrics["model_flop_use"] is None, "a CPU has no peak here"
    assert read(output, "training_args")["learning_rate"] == 0.01
    folders = {path.name for path in output.iterdir() if path.is_dir()}
    assert folders == {"best", "checkpoint-18", "checkpoint-24", "tokenizer"}
    head = AutoModelForMaskedLM if masked else AutoModelForCausalLM
    for folder in (output, output / "best", output / "checkpoint-24"):
        model, info = head.from_pretrained(folder, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"]
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert len(tokenizer) == model.config.vocab_size and (tokenizer.mask_token_id is not None) == masked
        assert (tokenizer("The Fox")["input_ids"] == tokenizer("the fox")["input_ids"]) == masked
    assert_same_weights(output, output / "checkpoint-24")


def test_a_step_is_that_of_its_blocks(options, tmp_path):
    """In one pass or in several, which have different numbers of targets; a run is resumed with any number of them."""
    more = (
        "--objective mlm --config_overrides causal=false,hidden_dropout_prob=0 --max_steps 6 --checkpointing_steps 3"
    )
    whole, tokens = tmp_path / "whole", tmp_path / "tokens"
    run_script("pretrain", *options[:-2], more, f"--output_dir {whole} --per_device_train_batch_size 8")
    options = [*options[:-2], more, f"--global_batch_tokens 256 --output_dir {tokens}"]
    names = ("per_device_train_batch_size", "gradient_accumulation_steps")
    run_script("pretrain", *options)
    assert_same_weights(whole, tokens)
    assert [read(tokens, "training_args")[name] for name in names] == [8, 1]
    for folder in (tokens / "best", tokens / "checkpoint-6"):
        shutil.rmtree(folder)
    run_script("pretrain", *options, "--per_device_train_batch_size 2 --resume_from_checkpoint latest")
    assert [read(tokens, "training_args")[name] for name in names] == [2, 4]
    assert_same_weights(whole, tokens, tolerance=2e-5)
    assert read(whole, "metrics")["loss"] == pytest.approx(read(tokens, "metrics")["loss"], abs=1e-5)


class ProductCounter(TorchDispatchMode):
    """Adds up the operations of matrix products, by PyTorch's formulas; its own counter needs gradients of modules."""

    total = 0
    formulas = flop_registry | {torch.ops.aten.addmm_: flop_registry[torch.ops.aten.addmm]}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        if formula := self.formulas.get(function.overloadpacket):
            self.total += formula(*args, **kwargs or {}, out_val=result)
        return result


def image_rows(rows: int) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.zeros(rows, 3, 24, 24), "labels": torch.zeros(rows, dtype=torch.long)}


def classified(rows: int) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.zeros(rows, 36, dtype=torch.long), "labels": torch.zeros(rows, dtype=torch.long)}


def token_rows(rows: int) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(rows, 36, dtype=torch.long) for name in ("input_ids", "labels")}


def series(rows: int) -> dict[str, torch.Tensor]:
    return {"past_values": torch.randn(rows, 36, 3), "future_values": torch.randn(rows, 40, 3)}


@pytest.mark.parametrize(
    ("head", "config", "batch", "lags"),
    [
        (TnnForCausalLM, tiny_config(**HYBRIDS["full"]), token_rows, 36),
        (TnnForMaskedLM, tiny_config("rtf", False), token_rows, 36),
        *((TnnForCausalLM, tiny_config(**fields), token_rows, 36) for fields in MIXED.values()),
        (TnnForSequenceClassification, tiny_config(num_labels=50), classified, 36),
        (TnnForTokenClassification, tiny_config(num_labels=50), token_rows, 36),
        (TnnForTimeSeriesPrediction, tiny_config(input_channels=3, prediction_length=40), series, 36),
        (TnnForImageClassification, image_config(num_labels=50), image_rows, 6),
    ],
)
def test_the_operations_of_a_token(head, config, batch, lags):
    """Those that PyTorch counts of matrix products, without what a pass computes once; transforms by themselves."""
    model, totals = seeded(head, config), []
    model.train().set_attn_implementation("eager")  # its products are operations of their own
    for rows in (1, 2):
        with ProductCounter() as counter:
            model(**batch(rows)).loss.backward()
        totals.append(counter.total)
    operators = config.layer_types.count("toeplitz") * (1 if lags == 36 else 2)  # an image has two in a layer
    transforms = 20 * math.log2(2 * lags) * operators * config.operator_dim
    counted = (totals[1] - totals[0]) / 36 + transforms
    counted += 6 * sum(part.numel() for name, part in model.named_parameters() if name.endswith("short.taps"))
    assert flops_of_token(model, 36) == pytest.approx(counted, rel=0.03)


@pytest.mark.parametrize("kind, error", slow(("tnn", None), ("tnn", "no compiler"), ("gpt2", "no compiler")))
def test_compiled(kind, error, pretrain, tmp_path, monkeypatch, caplog):
    """One graph for all layers, and the checkpoints of a run that is not compiled; without a compiler, one warning."""
    compiled, graphs = torch.compile, []

    def backend(graph, inputs):  # not Inductor, which takes a minute
        graphs.append(graph)
        if error is not None:
            raise ValueError(error)
        return graph.forward

    monkeypatch.setattr(torch, "compile", lambda function, **given: compiled(function, backend=backend, **given))
    if kind == "gpt2":
        save_gpt2(tmp_path / "config")
    for name, more in (("plain", []), ("compiled", ["--torch_compile"])):
        pretrain(f"--vocab_size 300 --checkpointing_steps 4 --output_dir {tmp_path / name}", *more)
    torch.compiler.reset()
    assert error is not None or len(graphs) == 1, "on a CPU each layer makes its kernel"
    assert caplog.text.count("cannot be compiled and is trained without") == int(error is not None)
    for part in ("", "best", "checkpoint-4"):
        assert_same_weights(tmp_path / "plain" / part, tmp_path / "compiled" / part, tolerance=1e-6)


def test_bfloat16(pretrain, tmp_path, caplog, monkeypatch):
    """Under autocast, with weights in single precision: close to what float32 gives. A slow CPU is named."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    for name in ("no", "bf16"):
        pretrain(f"--mixed_precision {name} --output_dir {tmp_path / name}")
    exact, rounded = (read(tmp_path / name, "metrics")["loss"] for name in ("no", "bf16"))
    assert exact != rounded and rounded == pytest.approx(exact, rel=0.02)
    assert {tensor.dtype for tensor in weights(tmp_path / "bf16").values()} == {torch.float32}
    assert caplog.text.count("on a CPU: --mixed_precision no is faster") == 1


LOSSES = [(True, "tnn"), (False, "tnn"), (True, "gpt2"), (False, "bert")]


@pytest.mark.parametrize("causal, kind", LOSSES)
def test_the_loss_is_a_sum_of_cross_entropies(causal, kind, monkeypatch):
    """With a shift or without; the logits of a TNN are not kept."""
    if kind == "tnn":
        head, config = (
            TnnForCausalLM if causal else TnnForMaskedLM,
            tiny_config(causal=causal, hidden_dropout_prob=0.0),
        )
        model = seeded(head, config).train()
    else:
        sizes = {"vocab_size": 50, "num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2}
        config = AutoConfig.for_model(kind, **sizes, intermediate_size=16)
        model = (AutoModelForCausalLM if causal else AutoModelForMaskedLM).from_config(config).eval()
    ids = torch.randint(10, 50, (3, 7), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[0, 3:5] = -100
    logits, parameters = model(ids).logits, list(model.parameters())
    shifted = (logits[:, :-1], labels[:, 1:]) if causal else (logits, labels)
    expected = F.cross_entropy(shifted[0].flatten(0, 1), shifted[1].flatten(), reduction="sum")
    assert count_targets(labels, causal).tolist() == ([4, 6, 6] if causal else [5, 7, 7])
    torch.testing.assert_close(token_losses(logits, labels, causal).sum(), expected)
    if kind == "tnn":
        monkeypatch.setattr(passes, "token_losses", None)
    found = summed_loss(model, model.config, {"input_ids": ids, "labels": labels}, causal)
    torch.testing.assert_close(found, expected)
    wanted = torch.autograd.grad(expected, parameters, allow_unused=True)
    torch.testing.assert_close(torch.autograd.grad(found, parameters, allow_unused=True), wanted)


def test_the_schedule_and_what_is_tracked(pretrain, tmp_path):
    pretrain("--lr_scheduler_type inverse_sqrt --warmup_steps 4 --report_to tensorboard --logging_steps 1")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(next((tmp_path / "out").rglob("events*")).parent)).Reload()
    rates = [event.value for event in events.Scalars("learning_rate")]
    assert rates[:4] == pytest.approx([0.0025, 0.005, 0.0075, 0.01]) and rates[-1] == pytest.approx(0.01 * 0.5**0.5)
    assert len(events.Scalars("loss")) == 8


@pytest.mark.slow
def test_a_run_is_continued_from_before_its_decay(pretrain, tmp_path):
    """A checkpoint before the decay of `warmup_stable_decay` serves a longer run, with a longer decay too."""
    schedule = "--lr_scheduler_type warmup_stable_decay --warmup_steps 2 --lr_scheduler_kwargs "
    longer = schedule + """'{"num_decay_steps": 6}' --max_steps 16"""
    pretrain(schedule + """'{"num_decay_steps": 4}' --checkpointing_steps 4""")
    pretrain(longer, f"--resume_from_checkpoint {tmp_path}/out/checkpoint-4")
    pretrain(longer, f"--output_dir {tmp_path}/unbroken")
    assert_same_weights(tmp_path / "out", tmp_path / "unbroken")


def stream(masked: bool, text, **fields) -> BlockStream:
    texts = load_corpus(str(text))["train"]
    tokenizer = train_tokenizer(texts, 300, masked)
    return BlockStream(pack(texts, tokenizer, 16, enclose=masked), tokenizer, masked, **fields)


def test_every_epoch_has_every_block_once_in_another_order(text):
    first, second = stream(False, text, seed=3), stream(False, text, seed=4)
    size = len(first)
    epochs = [[tuple(blocks[i]["input_ids"].tolist()) for i in range(start, start + size)]
              for blocks, start in ((first, 0), (first, size), (second, 0))]  # fmt: skip
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(epochs[2])
    assert epochs[0] != epochs[1] and epochs[0] != epochs[2]


def test_masks_depend_on_the_number_of_the_example_alone(text):
    first, second = stream(True, text, seed=1), stream(True, text, seed=1)
    set_seed(5)
    later = first[40]
    for number in (7, 3, 40):
        again = second[number]
    assert torch.equal(later["input_ids"], again["input_ids"]) and torch.equal(later["labels"], again["labels"])
    assert not torch.equal(later["labels"], first[40 + len(first)]["labels"]), "another epoch has other masks"
    predicted = torch.stack([first[i]["labels"] for i in range(300)]) != -100
    assert predicted.float().mean() == pytest.approx(0.15 * 14 / 16, abs=0.01)
    assert not predicted[:, [0, -1]].any(), "<s> and </s> are not masked"


def test_blocks_are_cached_and_enclosed_and_those_of_several_processes(text):
    texts = load_corpus(str(text))["train"]
    tokenizer = train_tokenizer(texts, 300, masked=True)
    one, again, two = (pack(texts, tokenizer, 16, enclose=True, num_proc=number) for number in (1, 1, 2))
    assert one.cache_files and one.cache_files == again.cache_files
    assert list(one["input_ids"]) == list(two["input_ids"])
    assert {(len(block), block[0], block[-1]) for block in one["input_ids"]} == {(16, 0, 2)}
    assert tokenizer.decode(tokenizer("fox", "dog")["input_ids"]) == "<s>fox</s></s>dog</s>"
    assert workers_for(texts) == 1


def test_poles_are_kept_inside(pretrain, tmp_path, caplog):
    """With rates that drive them out; without the option they are named, and no cached generation is suggested."""
    caplog.set_level("INFO")
    more = "--config_overrides tno_type=rtf,rtf_constraint=null,rtf_initializer=xavier --learning_rate 0.3"
    pretrain(more, f"--max_pole_radius 0.9 --output_dir {tmp_path}/inside")
    assert "The training ended with poles outside" not in caplog.text and "--use_cache false" not in caplog.text
    pretrain(more)
    assert "The training ended with poles outside" in caplog.text and "--use_cache false" in caplog.text
    model, other = (AutoModelForCausalLM.from_pretrained(tmp_path / folder) for folder in ("inside", "out"))
    assert find_unstable(other) and not find_unstable(model, 0.901)


def test_what_belongs_to_a_run(options, pretrain, tmp_path, caplog):
    """Its seed and fields. A resumed run keeps the rate of its checkpoint, given or not, and says what it takes."""
    caplog.set_level("INFO", "pretrain")
    pretrain("--checkpointing_steps 4 --save_total_limit 2")
    assert re.search(rf"next:\n    (/.*)?tnn generate --model_name_or_path {tmp_path}/out --prompt", caplog.text)
    before = tree(tmp_path / "out")
    with pytest.raises(SystemExit, match=r"another run.\n  seed must be 0, got 1\n  config.rpe_dim must be 16, got 8"):
        pretrain("--resume_from_checkpoint latest --seed 1 --config_overrides rpe_dim=8")
    assert tree(tmp_path / "out") == before
    place = options.index("--learning_rate")
    plain = options[:place] + options[place + 2 :]
    caplog.clear()
    run_script("pretrain", *plain, "--max_steps 12 --resume_from_checkpoint latest")
    assert f"learning rate 0.01, that of {tmp_path / 'out' / 'checkpoint-8'}; --learning_rate" in caplog.text
    assert read(tmp_path / "out", "training_args")["learning_rate"] == 0.01
    run_script("pretrain", *plain, f"--output_dir {tmp_path}/new --max_steps 1")
    assert "learning rate 0.032, by the rule for a width of 32" in caplog.text


def test_what_a_checkpoint_must_agree_with():
    """Model and options that change weights; not where and how a step is computed, or what the checkpoint lacks."""

    def run(tno_type, **options):
        args = PretrainArguments(learning_rate=0.01, **options)
        return describe_run(dataclasses.asdict(args), TnnConfig(tno_type=tno_type), blocks_per_step=4)

    saved = run("fd")
    elsewhere = {"use_cpu": True, "torch_compile": True, "gradient_checkpointing": True, "output_dir": "there"}
    check_same_run("there", saved, run("fd", **elsewhere))
    with pytest.raises(ValueError, match="optim must be .*, got sgd\n  config.tno_type must be fd, got"):
        check_same_run("there", saved, run("rtf", optim="sgd"))
    older = {name: value for name, value in saved.items() if name not in ("optim", "config.tno_type")}
    check_same_run("there", older, run("rtf", optim="sgd"))
