"""Convert a causal model to a recurrence, and measure the change on a text."""

import argparse
import math
import time
from dataclasses import asdict

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import modeling_tnn  # noqa: F401 - registers the model with the Auto classes
from tnn_scripts.common.atomic import new_files, write_json
from tnn_scripts.common.gradient_fit import FITS, convert_by_gradient
from tnn_scripts.common.loading import load
from tnn_scripts.data.text import load_corpus, pack
from tnn_scripts.data.vocabulary import check_vocabulary

GRADIENT_COLUMNS = (
    "order", "taps", "l2_layer", "l2_worst", "mse", "largest_pole", "direct_l2_layer", "direct_l2_worst", "direct_mse",
)  # fmt: skip
COLUMNS = ("order", "taps", "l2_layer", "l2_median", "l2_worst", "tail_bound", "largest_pole")


def compare(model, converted, blocks: torch.Tensor) -> dict:
    """The perplexities, the errors of the logits and the agreement of the likeliest tokens on ids `(R, L)`."""
    losses, worst, squares, agreeing, scale = [0.0, 0.0], 0.0, 0.0, 0, 0.0
    with torch.no_grad():
        for row in blocks[:, None]:
            before, after = (m(row, use_cache=False).logits[0].float() for m in (model, converted))  # (L, V)
            for index, logits in enumerate((before, after)):
                losses[index] += cross_entropy(logits[:-1], row[0, 1:]).item() / len(blocks)
            worst = max(worst, (after - before).abs().max().item())
            squares += (after - before).square().mean().item() / len(blocks)
            scale += before.std().item() / len(blocks)
            agreeing += (before.argmax(-1) == after.argmax(-1)).sum().item()
    before, after = (math.exp(loss) for loss in losses)
    return {
        "perplexity_before": before,
        "perplexity_after": after,
        "perplexity_change": after / before - 1,
        "logit_error_max": worst,
        "logit_error_rms": math.sqrt(squares),
        "logit_std": scale,
        "top1_agreement": agreeing / blocks.numel(),
        "tokens": blocks.numel(),
        "length": blocks.shape[1],
    }


def convert(model, args: argparse.Namespace) -> tuple[PreTrainedModel, list[dict]]:
    """The recurrent model, and a report of each layer."""
    if args.fit in FITS:
        return convert_by_gradient(model, args.order, args.window, args.steps, args.learning_rate, args.fit)
    converted, layers = model.to_recurrent(args.order, args.window, args.tolerance)
    return converted, [asdict(layer) for layer in layers]


def run(args: argparse.Namespace) -> dict:
    """Convert, measure and save; the contents of `conversion.json`.

    Raises:
        ValueError: model, tokenizer, options and text do not fit together.
        SavingError: the model could not be written.
    """
    tokenizer = load(AutoTokenizer, args.model_name_or_path)
    model = load(AutoModelForCausalLM, args.model_name_or_path).eval()
    if model.config.model_type != "tnn":
        raise ValueError(
            f"--model_name_or_path must be a TNN, got {args.model_name_or_path} of {model.config.model_type}"
        )
    check_vocabulary(tokenizer, model.config.vocab_size)
    start = time.perf_counter()
    converted, layers = convert(model, args)
    seconds = time.perf_counter() - start
    length = args.block_size or 8 * model.config.max_position_embeddings
    corpus = load_corpus(args.dataset_name, args.dataset_config_name, documents=args.documents)
    packed = pack(corpus["validation"], tokenizer, length)["input_ids"][: args.rows]
    if not packed:
        raise ValueError(
            f"The validation text has fewer than {length} tokens. Give a longer text or a smaller --block_size."
        )
    result = {
        "model": args.model_name_or_path,
        "converted_from": model.config.tno_type,
        "modes": converted.config.num_modes if converted.config.tno_type == "modal" else None,
        "seconds": seconds,
        "fit": args.fit,
        "steps": args.steps if args.fit in FITS else None,
        "layers": layers,
        "comparison": compare(model, converted, torch.tensor(packed)),
    }
    with new_files(args.output_dir) as folder:
        converted.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        write_json(folder / "conversion.json", result)
    return result


def summary(result: dict) -> str:
    if not result["layers"]:
        lines = [f"A model with tno_type='{result['converted_from']}' is a recurrence already: saved as it is."]
    else:
        columns = COLUMNS if result["fit"] == "direct" else GRADIENT_COLUMNS
        lines = ["layer " + " ".join(f"{name:>15}" for name in columns)]
        for layer in result["layers"]:
            cells = (f"{layer[c]:>15.2e}" if isinstance(layer[c], float) else f"{layer[c]:>15}" for c in columns)
            lines.append(f"{layer['layer']:>5} " + " ".join(cells))
        lines.append(f"{result['seconds'] / len(result['layers']):.2f} s a layer")
    measured = result["comparison"]
    lines.append(
        f"perplexity {measured['perplexity_before']:.3f} before, {measured['perplexity_after']:.3f} after "
        f"({measured['perplexity_change']:+.1e}); logit error {measured['logit_error_max']:.1e} at most, "
        f"{measured['logit_error_rms']:.1e} rms (std {measured['logit_std']:.1f}); "
        f"top-1 agreement {measured['top1_agreement']:.3%} on {measured['tokens']} tokens in rows of "
        f"{measured['length']}"
    )
    return "\n".join(lines)
