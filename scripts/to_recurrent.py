"""Convert a causal model to a recurrence of low order, save it, and measure the change on a text.

Poles are computed from the kernels (tno_type="modal"); recurrences of more states, such as rtf and s4d, are reduced to
s4d. `docs/research/distil.py` fits poles by gradient descent, as the RTF paper does.

Example:
    python scripts/to_recurrent.py --model_name_or_path outputs/demo --output_dir outputs/modal --dataset_name book.txt
    python scripts/to_recurrent.py --model_name_or_path outputs/demo --output_dir outputs/modal --tolerance 1e-4
"""

import argparse
import math
import sys
import time
from dataclasses import asdict
from pathlib import Path

from tnn_programs.cli.errors import importing, report_errors

from tnn_programs.cli.atomic import check_overwriting, claim, new_files, write_json
from tnn_programs.cli.model_path import check_model_path
from tnn_programs.cli.parser import ProgramParser
from tnn_programs.cli.text_files import check_source

COLUMNS = (
    "order",
    "taps",
    "l2_layer",
    "l2_median",
    "l2_worst",
    "tail_bound",
    "largest_pole",
    "output_bound",
    "hankel_bound",
)


def parser() -> ProgramParser:
    parser = ProgramParser(description=__doc__)
    parser.add_argument("--model_name_or_path", required=True)
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--overwrite_output_dir", action="store_true")
    parser.add_argument("--order", type=int, default=64, help="Number of real states per channel.")
    parser.add_argument("--window", type=int, default=16, help="Number of first taps that are kept exactly.")
    parser.add_argument("--tolerance", type=float, help="Use the smallest order with this relative error instead.")
    parser.add_argument("--dataset_name")
    parser.add_argument("--dataset_config_name")
    parser.add_argument("--documents")
    parser.add_argument("--block_size", type=int)
    parser.add_argument("--rows", type=int, default=8, help="Number of rows of text to measure on.")
    return parser


def compare(model, converted, blocks) -> dict:
    """The perplexities, the errors of the logits and the agreement of the likeliest tokens on ids `(R, L)`."""
    import torch
    from torch.nn.functional import cross_entropy

    figures = []
    with torch.no_grad():
        for row in blocks[:, None]:
            before, after = (m(row, use_cache=False).logits[0].float() for m in (model, converted))  # (L, V)
            losses = (cross_entropy(logits[:-1], row[0, 1:]) for logits in (before, after))
            agreeing, error = (before.argmax(-1) == after.argmax(-1)).float().mean(), after - before
            figures.append([*losses, error.square().mean(), before.std(), agreeing, error.abs().max()])
    figures = torch.tensor(figures, dtype=torch.float64)  # (R, 6)
    loss_before, loss_after, square, scale, agreement, _ = figures.mean(dim=0).tolist()
    return {
        "perplexity_before": math.exp(loss_before),
        "perplexity_after": math.exp(loss_after),
        "perplexity_change": math.exp(loss_after - loss_before) - 1,
        "logit_error_max": figures[:, -1].max().item(),
        "logit_error_rms": math.sqrt(square),
        "logit_std": scale,
        "top1_agreement": agreement,
        "tokens": blocks.numel(),
        "length": blocks.shape[1],
    }


def to_recurrent(model, args: argparse.Namespace) -> tuple:
    """The recurrent model, and a report of each layer."""
    converted, layers = model.to_recurrent(args.order, args.window, args.tolerance)
    return converted, [asdict(layer) for layer in layers]


def run(args: argparse.Namespace, convert=to_recurrent) -> dict:
    """Convert, measure and save; the contents of `conversion.json`."""
    with importing("scripts"):
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        import modeling_tnn  # noqa: F401 - registers the model with the Auto classes
        from modeling_tnn.data.text import pack
        from tnn_programs.cli.model_path import check_vocabulary, load
        from tnn_programs.data.corpus import load_corpus
    name, tokenizer = args.model_name_or_path, load(AutoTokenizer, args.model_name_or_path)
    model = load(AutoModelForCausalLM, name).eval()
    if model.config.model_type != "tnn":
        raise ValueError(f"--model_name_or_path must be a TNN, got {name} of {model.config.model_type}")
    check_vocabulary(tokenizer, model.config.vocab_size)
    start = time.perf_counter()
    converted, layers = convert(model, args)
    after = converted.config.tno_types[0]
    result = {
        "model": name,
        "converted_from": model.config.tno_types[0],
        "modes": {"modal": converted.config.num_modes, "s4d": converted.config.s4d_state_size // 2}.get(after),
        "seconds": time.perf_counter() - start,
        "fit": getattr(args, "fit", "direct"),
        "steps": getattr(args, "steps", None),
        "layers": layers,
    }
    length = args.block_size or 8 * model.config.max_position_embeddings
    corpus = load_corpus(args.dataset_name, args.dataset_config_name, documents=args.documents)
    packed = pack(corpus["validation"], tokenizer, length)["input_ids"][: args.rows]
    if not packed:
        raise ValueError(f"The validation text has fewer than {length} tokens: give more, or a smaller --block_size")
    result["comparison"] = compare(model, converted, torch.tensor(packed))
    with new_files(args.output_dir) as folder:
        converted.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        write_json(folder / "conversion.json", result)
    return result


def summary(result: dict, columns: tuple[str, ...] = COLUMNS) -> str:
    from tabulate import tabulate

    lines = [f"A model with tno_type='{result['converted_from']}' is a recurrence already: saved as it is."]
    if result["layers"]:
        rows = [[layer[name] for name in ("layer", *columns)] for layer in result["layers"]]
        lines = [tabulate(rows, ["layer", *columns], floatfmt=".2e")]
        lines.append(f"{result['seconds'] / len(rows):.2f} s a layer")
    return "\n".join(lines) + (
        "\nperplexity {perplexity_before:.3f} before, {perplexity_after:.3f} after ({perplexity_change:+.1e}); logit "
        "error {logit_error_max:.1e} at most, {logit_error_rms:.1e} rms (std {logit_std:.1f}); top-1 agreement "
        "{top1_agreement:.3%} on {tokens} tokens in rows of {length}"
    ).format(**result["comparison"])


@report_errors
def main():
    args = parser().parse_args()
    check_model_path(args.model_name_or_path, tokenizer=True, causal=True)
    if args.dataset_name is not None:
        check_source(args.dataset_name)
    with claim(args.output_dir):
        check_overwriting(args.output_dir, args.overwrite_output_dir, args.model_name_or_path)
        result = run(args)
    sys.stdout.write(summary(result) + f"\nsaved in {args.output_dir}\n")


if __name__ == "__main__":
    main()
