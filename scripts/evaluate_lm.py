"""Measure perplexity and bits per byte of causal language models on a text, by the length of the rows they read.

Every length scores the same tokens once: all tokens of the text except the first. The text is cut into rows that
overlap by one token. Every token of a row except the first is scored, given the tokens before it in the row. With
--stride S, rows begin every S tokens, and only their last S tokens are scored (in the first row all except the first).
Each score then has a context of nearly the whole length. The last row may be shorter. Rows longer than
--tokens_per_pass are read in parts with a cache, so that memory does not grow with the length if the state of the
model does not. Bits per byte count the bytes of the text that the scored tokens span, see token_bytes.py.

Example:
    python scripts/evaluate_lm.py --model_name_or_path outputs/wikitext2 --dataset_name Salesforce/wikitext \\
        --dataset_config_name wikitext-2-v1 --lengths 512 1024 2048 4096 14336 --output_dir outputs/lengths
    python scripts/evaluate_lm.py --model_name_or_path outputs/a outputs/b --validation_file book.txt --stride 256 \\
        --output_dir outputs/lengths
"""

import argparse
import json
import math
import sys
from pathlib import Path

from tnn_scripts.common.errors import report_errors

import matplotlib
import torch
from matplotlib import pyplot
from transformers import AutoModelForCausalLM, AutoTokenizer

import modeling_tnn  # noqa: F401 - registers the model with the Auto classes
from tnn_scripts.common.atomic import claim, saving_errors, write_json, write_text
from tnn_scripts.common.devices import check_device, suggest_smaller
from tnn_scripts.common.parser import ProgramParser
from tnn_scripts.common.scoring import evaluate
from tnn_scripts.common.tables import markdown_table
from tnn_scripts.data.text import check_file, check_vocabulary, load_texts, tokenize
from tnn_scripts.data.token_bytes import bytes_until


def parse_arguments() -> argparse.Namespace:
    parser = ProgramParser(description=__doc__)
    parser.add_argument("--model_name_or_path", required=True, nargs="+")
    parser.add_argument("--validation_file")
    parser.add_argument("--dataset_name")
    parser.add_argument("--dataset_config_name")
    parser.add_argument("--split", default="test", help="Split of the data set.")
    parser.add_argument("--text_column", default="text")
    parser.add_argument("--documents")
    lengths = [512, 1024, 2048, 4096, 8192, 14336]
    parser.add_argument("--lengths", type=int, nargs="+", default=lengths)
    parser.add_argument("--stride", type=int, help="Also evaluate with rows that begin every so many tokens.")
    parser.add_argument("--max_tokens", type=int, help="Read only the first so many tokens of the text.")
    parser.add_argument("--tokens_per_pass", type=int, default=4096, help="Tokens in a forward pass; limits memory.")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--trust_remote_code", action="store_true")
    args = parser.parse_args()
    if (args.validation_file is None) == (args.dataset_name is None):
        parser.error("either --validation_file or --dataset_name must be given, and not both")
    if min(args.lengths) < 2:
        parser.error(f"--lengths must be at least 2, got {min(args.lengths)}")
    if args.tokens_per_pass < 1:
        parser.error(f"--tokens_per_pass must be at least 1, got {args.tokens_per_pass}")
    if args.stride is not None and not 1 <= args.stride < min(args.lengths):
        parser.error(f"--stride must be at least 1 and below the smallest of --lengths, got {args.stride}")
    return args


def trained_length(folder: str, config) -> int | None:
    """The length of the training blocks: from training_args.json beside the model, or else from its configuration."""
    arguments = Path(folder) / "training_args.json"
    if arguments.is_file():
        return json.loads(arguments.read_text(encoding="utf-8")).get("block_size")
    return getattr(config, "max_position_embeddings", None)


def evaluate_model(name: str, texts, args: argparse.Namespace) -> list[dict]:
    """Evaluate a model; one result for each length and stride.

    Raises:
        ValueError: the text is shorter than the shortest length.
    """
    code = {"trust_remote_code": args.trust_remote_code}
    tokenizer = AutoTokenizer.from_pretrained(name, **code)
    model = AutoModelForCausalLM.from_pretrained(name, dtype=args.dtype, **code).eval().to(args.device)
    check_vocabulary(tokenizer, model.config.vocab_size)
    lines = tokenize(texts["text"], tokenizer, texts["ends"])
    ids = torch.tensor([token for line in lines for token in line])
    ids = ids[: args.max_tokens]
    first, last = (bytes_until(texts["text"], lines, tokenizer, count) for count in (1, len(ids)))
    longest = None if model.config.model_type == "tnn" else getattr(model.config, "max_position_embeddings", None)
    results = []
    for length in args.lengths:
        if length > len(ids) or (longest is not None and length > longest):
            what = f"the text has {len(ids)} tokens" if length > len(ids) else f"the model takes at most {longest}"
            sys.stderr.write(f"{name}: length {length} is left out, because {what}.\n")
            continue
        for stride in [None] if args.stride is None else [None, args.stride]:
            advice = f"give a smaller --tokens_per_pass than {args.tokens_per_pass}"
            with suggest_smaller(f"{name} at length {length}", advice):
                result = evaluate(model, ids, length, stride, args.tokens_per_pass)
            figures = {
                "perplexity": math.exp(min(result["loss"], 700)),
                "bits_per_byte": result["loss"] * result["tokens"] / math.log(2) / (last - first),
                "bytes": last - first,
            }
            fields = {"model": name, "trained_length": trained_length(name, model.config), "length": length}
            results.append(fields | {"stride": stride} | figures | result)
    if not results:
        raise ValueError(f"--lengths must have one that fits {name} and the {len(ids)} tokens of the text, got none")
    return results


def labels(results: list[dict]) -> list[tuple[str, int | None]]:
    """The names of the lines of the plot and the columns of the table: model and stride."""
    return list(dict.fromkeys((result["model"], result["stride"]) for result in results))


def label_text(model: str, stride: int | None) -> str:
    return Path(model).name + (f", stride {stride}" if stride else "")


def table(results: list[dict]) -> str:
    """A Markdown table of perplexity and bits per byte by length."""
    columns = labels(results)
    figures = {
        (r["model"], r["stride"], r["length"]): f"{r['perplexity']:.2f} ({r['bits_per_byte']:.3f})" for r in results
    }
    lines = []
    for length in sorted({result["length"] for result in results}):
        cells = [figures.get((*column, length), "") for column in columns]
        lines.append([length, *cells])
    return markdown_table(["length", *(label_text(*column) for column in columns)], lines, texts=0)


def plot(results: list[dict], file: Path):
    """Draw perplexity over length, with a mark at the length of the training."""
    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for model, stride in labels(results):
        points = [(r["length"], r["perplexity"]) for r in results if (r["model"], r["stride"]) == (model, stride)]
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=label_text(model, stride))
    for length in {result["trained_length"] for result in results} - {None}:
        axes.axvline(length, color="gray", linestyle="--", linewidth=1)
        axes.annotate(f"trained at {length}", (length, 1), xycoords=("data", "axes fraction"), fontsize=8,
                      xytext=(3, -3), textcoords="offset points", va="top", color="gray")  # fmt: skip
    perplexities = [result["perplexity"] for result in results]
    axes.set_xscale("log", base=2)
    if max(perplexities) > 4 * min(perplexities):
        axes.set_yscale("log")
    lengths = sorted({result["length"] for result in results})
    axes.set_xticks(lengths, [str(length) for length in lengths], rotation=45)
    axes.set_xlabel("length of the text read at once, in tokens")
    axes.set_ylabel("perplexity per token")
    figure.legend(loc="outside right upper")
    figure.savefig(file, dpi=150)
    pyplot.close(figure)


def report(results: list[dict], args: argparse.Namespace):
    """Write the results so far as JSON, Markdown and a plot."""
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    write_json(args.output_dir / "all_results.json", {"settings": settings, "results": results})
    write_text(args.output_dir / "perplexity.md", table(results) + "\n")
    with saving_errors(args.output_dir / "perplexity.png", args.output_dir / "perplexity.png"):
        plot(results, args.output_dir / "perplexity.png")


@report_errors
def main():
    args = parse_arguments()
    matplotlib.use("Agg")
    check_device(args.device)
    if args.validation_file is not None:
        check_file(args.validation_file)
    source = (args.validation_file or args.dataset_name, args.dataset_config_name, args.split, args.text_column)
    texts = load_texts(*source, args.documents)
    results = []
    with claim(args.output_dir):
        for name in args.model_name_or_path:
            results += evaluate_model(name, texts, args)
            report(results, args)
    sys.stdout.write(f"perplexity (bits per byte)\n\n{table(results)}\n\nsaved in {args.output_dir}\n")


if __name__ == "__main__":
    main()
