"""Measure perplexity and bits per byte of language models by the length of the rows they read."""

import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from tnn_programs.cli.errors import suggest_smaller

import matplotlib
import torch
from matplotlib import pyplot
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer

from modeling_tnn.data.text import enclosing_tokens, tokenize, with_line_break
from modeling_tnn.recurrence import DivergenceError
from modeling_tnn.tools.comparing import plot_by_length, score_tokens
from tnn_programs.cli.atomic import claim, read_json, saving_errors, write_json, write_text
from tnn_programs.cli.model_path import check_device, check_vocabulary, load
from tnn_programs.cli.parser import parse_overrides
from tnn_programs.cli.tables import markdown_table
from tnn_programs.data.corpus import load_texts
from tnn_programs.training.scoring import by_context, bytes_until, hidden_tokens, interval, score_masked


def trained_length(folder: str, config) -> int | None:
    """The length of the training blocks: from training_args.json beside the model, or else from its configuration."""
    arguments = Path(folder) / "training_args.json"
    if arguments.is_file():
        blocks = read_json(arguments).get("block_size")  # None: of another program
        if isinstance(blocks, int):
            return blocks
    return getattr(config, "max_position_embeddings", None)


class Documents:
    """Documents of the scored tokens of a text, all but the first of `count`.

    `owners` `(T-1,)` are the documents of the tokens, `bytes` `(N,)` what the tokens of each document span.
    """

    def __init__(self, texts, lines: list[list[int]], tokenizer, count: int):
        ends = torch.tensor(texts["ends"]).cumsum(0)
        of_line = torch.cat([torch.zeros(1, dtype=torch.long), ends[:-1]])  # a line after an end is of the next one
        self.owners = of_line.repeat_interleave(torch.tensor([len(line) for line in lines]))[1:count]
        sizes = torch.tensor([len(with_line_break(text).encode()) for text in texts["text"]], dtype=torch.float64)
        self.bytes = torch.zeros(int(self.owners[-1]) + 1, dtype=torch.float64)
        read = of_line < len(self.bytes)
        self.bytes.index_add_(0, of_line[read], sizes[read])
        first, last = (bytes_until(texts["text"], lines, tokenizer, tokens) for tokens in (1, count))
        self.bytes[0] -= first
        self.bytes[-1] += (last - first) - self.bytes.sum()  # the last one may not be read to its end

    def bits(self, nats: torch.Tensor) -> torch.Tensor:
        """The bits of each document `(N,)`, from the losses in nats of the scored tokens `(T-1,)`."""
        return torch.zeros_like(self.bytes).index_add_(0, self.owners, nats) / math.log(2)


def evaluate_model(name: str, texts, args) -> list[dict]:
    """Evaluate a model; one result for each length and stride."""
    code = {"trust_remote_code": args.trust_remote_code}
    tokenizer = load(AutoTokenizer, name, **code)
    fields = parse_overrides(args.config_overrides, load(AutoConfig, name, **code))
    build, prepare = OBJECTIVES[args.objective]
    model = load(build, name, dtype=args.dtype, **code, **fields).eval().to(args.device)
    check_vocabulary(tokenizer, model.config.vocab_size)
    count, figures_at = prepare(model, tokenizer, texts, args)
    longest = None if model.config.model_type == "tnn" else getattr(model.config, "max_position_embeddings", None)
    results = []
    for length in args.lengths:
        if length > count or (longest is not None and length > longest):
            what = f"the text has {count} tokens" if length > count else f"the model takes at most {longest}"
            sys.stderr.write(f"{name}: length {length} is left out, because {what}.\n")
            continue
        for stride in [None] if args.stride is None else [None, args.stride]:
            start = time.perf_counter()
            advice = f"give a smaller --tokens_per_pass than {args.tokens_per_pass}"
            try:
                with suggest_smaller(f"{name} at length {length}", advice):
                    figures = figures_at(length, stride)
                what = None if math.isfinite(figures["loss"]) else "The loss is not finite."
            except DivergenceError as error:
                what = str(error)
            if what:
                sys.stderr.write(f"{name}: length {length} is left out. {what}\n")
                continue
            about = {"model": name, "trained_length": trained_length(name, model.config), "length": length}
            results.append({**about, "stride": stride, **figures, "seconds": time.perf_counter() - start})
    if not results:
        listed = " ".join(map(str, args.lengths))
        raise ValueError(f"--lengths must have one that fits {name} and the {count} tokens of the text, got {listed}")
    return results


def causal_figures(model, tokenizer, texts, args) -> tuple[int, Callable]:
    """The number of tokens of the text, and a function from a length and a stride to the figures of causal models."""
    lines = tokenize(texts["text"], tokenizer, texts["ends"])
    ids = torch.tensor([token for line in lines for token in line])[: args.max_tokens]
    if len(ids) < 2:
        raise ValueError(f"The text must have at least 2 tokens, got {len(ids)}")
    documents = Documents(texts, lines, tokenizer, len(ids))

    def figures_at(length: int, stride: int | None) -> dict[str, object]:
        nats = score_tokens(model, ids, length, stride, args.tokens_per_pass)
        bits, size = documents.bits(nats), documents.bytes.sum()
        figures = losses_of(nats) | {
            "bits_per_byte": (bits.sum() / size).item(),
            "bits_per_byte_interval": interval(bits, documents.bytes),
            "bytes": int(size),
            "documents": len(bits),
            "bits_of_documents": bits.tolist(),
            "bytes_of_documents": documents.bytes.tolist(),
        }
        return figures if stride is not None else figures | {"by_context": by_context(nats, length)}

    return len(ids), figures_at


def masked_figures(model, tokenizer, texts, args) -> tuple[int, Callable]:
    """As `causal_figures`, for masked models."""
    if tokenizer.mask_token_id is None:
        raise ValueError(f"The tokenizer must have a mask token with --objective mlm, got {tokenizer.name_or_path}")
    ids = torch.tensor([token for line in tokenize(texts["text"], tokenizer) for token in line])[: args.max_tokens]
    hidden = hidden_tokens(len(ids), args.mlm_probability, args.seed)
    if not hidden.any():
        raise ValueError(f"--mlm_probability must hide a token of the text, got {args.mlm_probability}")
    special = tokenizer.mask_token_id, enclosing_tokens(tokenizer)
    least = sum(map(len, special[1])) + 1
    if min(args.lengths) < least:
        raise ValueError(f"--lengths must be at least {least} with --objective mlm, got {min(args.lengths)}")

    def figures_at(length: int, stride: None) -> dict[str, object]:
        return losses_of(score_masked(model, ids, hidden, length, *special, args.tokens_per_pass))

    return len(ids), figures_at


# Kinds of language models: how they are loaded, and how they are scored.
OBJECTIVES = {"clm": (AutoModelForCausalLM, causal_figures), "mlm": (AutoModelForMaskedLM, masked_figures)}


def losses_of(nats: torch.Tensor) -> dict[str, float]:
    """The figures of scored tokens `(M,)`, in nats, without bytes."""
    loss = nats.mean().item()
    return {"perplexity": math.exp(min(loss, 700)), "loss": loss, "tokens": len(nats)}


def compare(results: list[dict]):
    """Write into each result of a model after the first its difference to the first one at the same length."""
    first = {(r["length"], r["stride"]): r for r in results if r["model"] == results[0]["model"]}
    for result in results:
        other = first.get((result["length"], result["stride"]), result)
        if other is result or other.get("bytes_of_documents", 0) != result.get("bytes_of_documents"):
            continue
        mine, others, sizes = (
            torch.tensor(values, dtype=torch.float64)
            for values in (result["bits_of_documents"], other["bits_of_documents"], result["bytes_of_documents"])
        )
        result["over_first"] = result["bits_per_byte"] - other["bits_per_byte"]
        result["over_first_interval"] = interval(mine - others, sizes)


def columns_of(results: list[dict]) -> dict[tuple, str]:
    """The columns of the tables and lines of the plot, by model and stride: a name, the last folder if all differ."""
    keys = dict.fromkeys((result["model"], result["stride"]) for result in results)
    short = {model: Path(model).name for model, _ in keys}
    names = short if len(set(short.values())) == len(short) else dict(zip(short, short, strict=True))
    return {(model, s): names[model] + (f", stride {s}" if s else "") for model, s in keys}


def tables(results: list[dict]) -> str:
    """Markdown tables: perplexity and bits per byte by length, differences to the first model, loss by context."""
    titles = columns_of(results)
    if "bits_per_byte" not in results[0]:
        return "perplexity of hidden tokens\n\n" + by_length(results, titles, lambda r: f"{r['perplexity']:.2f}")
    both = by_length(results, titles, lambda r: f"{r['perplexity']:.2f} ({figure_text(r, 'bits_per_byte', '.3f')})")
    text = f"perplexity (bits per byte)\n\n{both}"
    if differing := [result for result in results if "over_first" in result]:
        compared = {(r["model"], r["stride"]): titles[r["model"], r["stride"]] for r in differing}
        cells = by_length(differing, compared, lambda r: figure_text(r, "over_first", "+.3f"))
        text += f"\n\nbits per byte more than {titles[results[0]['model'], None]}\n\n{cells}"
    shown = longest(results)
    bins = max((result["by_context"] for result in shown), key=len)
    rows = [[f"{bin['first']} to {bin['last']}" if bin["first"] < bin["last"] else f"{bin['first']}"] for bin in bins]
    for line, row in enumerate(rows):
        row += [f"{r['by_context'][line]['loss']:.3f}" if line < len(r["by_context"]) else "" for r in shown]
    names = [f"{titles[r['model'], None]}, {r['length']}" for r in shown]
    return f"{text}\n\nloss in nats of a token\n\n" + markdown_table(["tokens before it", *names], rows, texts=1)


def figure_text(result: dict, name: str, form: str) -> str:
    half = result[name + "_interval"]
    return format(result[name], form) + ("" if half is None else f" ± {half:.3f}")


def by_length(results: list[dict], titles: dict[tuple, str], cell: Callable[[dict], str]) -> str:
    """A table with a row for each length, and a column for each model and stride."""
    cells = {(r["model"], r["stride"], r["length"]): cell(r) for r in results}
    lengths = sorted({key[-1] for key in cells})
    rows = [[length, *(cells.get((*column, length), "") for column in titles)] for length in lengths]
    return markdown_table(["length", *titles.values()], rows, texts=0)


def longest(results: list[dict]) -> list[dict]:
    """The result of each model at its largest length."""
    whole = sorted((result for result in results if result["stride"] is None), key=lambda r: r["length"])
    return list({r["model"]: r for r in whole}.values())


def plot(results: list[dict], file: Path):
    """Draw perplexity over length, with a mark at the length of the training."""
    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    titles, figures = columns_of(results), {}
    for r in results:
        figures.setdefault(titles[r["model"], r["stride"]], {})[r["length"]] = r["perplexity"]
    plot_by_length(figures, axes)
    for length in {result["trained_length"] for result in results} - {None}:
        axes.axvline(length, color="gray", linestyle="--", linewidth=1, label=f"trained at {length}")
    axes.set_yscale("log")
    axes.set_ylabel("perplexity per token")
    figure.legend(loc="outside right upper")
    figure.savefig(file, dpi=150)
    pyplot.close(figure)


def report(results: list[dict], args):
    """Write the results so far as JSON, Markdown and a plot."""
    shown = [{name: value for name, value in r.items() if not name.endswith("_of_documents")} for r in results]
    settings = asdict(args) | {"output_dir": str(args.output_dir)}
    write_json(args.output_dir / "all_results.json", {"settings": settings, "results": shown})
    write_text(args.output_dir / "perplexity.md", tables(results) + "\n")
    with saving_errors(args.output_dir / "perplexity.png", args.output_dir / "perplexity.png"):
        plot(results, args.output_dir / "perplexity.png")


def run(args):
    """Evaluate all models, and write the results after each."""
    matplotlib.use("Agg")
    args.device = check_device(args.device)
    source = (args.validation_file or args.dataset_name, args.dataset_config_name, args.split, args.text_column)
    texts = load_texts(*source, args.documents)
    results = []
    with claim(args.output_dir):
        for name in args.model_name_or_path:
            results += evaluate_model(name, texts, args)
            compare(results)
            report(results, args)
    sys.stdout.write(f"{tables(results)}\n\nsaved in {args.output_dir}\n")
