"""Measure models of fewer states: perplexity, the error of their kernels beside its bounds, and time for a token.

    output     max over channels of ||h - h'||_1,  reached by an input with the signs of the reversed error
    response   max over channels and frequencies of |H - H'|

Both are the largest of all layers, computed in float64 over `TAPS` taps. Times are CPU times of single tokens in one
process, of all models in turn; medians.

Example:
    python docs/research/reduction.py outputs/rtf --dataset_name Salesforce/wikitext --output_file reduction.json
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import modeling_tnn  # noqa: F401  (registers the models)
from modeling_tnn.cache_tnn import CACHE, state_bytes
from modeling_tnn.data.text import pack
from tnn_programs.cli.atomic import write_json
from tnn_programs.data.corpus import load_corpus
from tnn_programs.to_recurrent import compare

TAPS, ROUNDS, TOKENS = 2**14, 5, 30


def measured(model, converted) -> dict[str, float]:
    """The largest errors of the kernels of all layers."""
    outputs, responses = [], []
    for before, after in zip(model.model.layers, converted.model.layers, strict=True):
        taps = [layer.mixer.tno.double().coefficients(TAPS) for layer in (before, after)]  # (D, M) each
        error = taps[1] - taps[0]
        outputs.append(error.abs().sum(dim=1).max().item())
        responses.append(torch.fft.rfft(error, n=4 * TAPS).abs().max().item())
    return {"output": max(outputs), "response": max(responses)}


def milliseconds(models: list, ids: torch.Tensor) -> list[float]:
    """The time of a token of each model after a text `(1, L)`."""
    caches = [model(ids, use_cache=True)[CACHE] for model in models]
    times = [[] for _ in models]
    for _ in range(ROUNDS):
        for model, cache, own in zip(models, caches, times, strict=True):
            for _ in range(TOKENS):
                start = time.thread_time()
                model(ids[:, :1], **{CACHE: cache})
                own.append(1e3 * (time.thread_time() - start))
    return [statistics.median(own) for own in times]


@torch.no_grad()
def measure(args) -> list[dict]:
    model = AutoModelForCausalLM.from_pretrained(args.model).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    text = load_corpus(args.dataset_name, args.dataset_config_name)["validation"]
    blocks = torch.tensor(pack(text, tokenizer, args.block_size)["input_ids"][: args.rows])
    rows, models = [{"order": "as trained", "kind": model.config.tno_type}], [model]
    for order in args.orders:
        start = time.thread_time()
        converted, reports = model.to_recurrent(order=order)
        seconds = (time.thread_time() - start) / len(reports)
        figures = compare(model, converted, blocks)
        rows[0]["perplexity"] = figures["perplexity_before"]
        row = {"order": order, "kind": converted.config.tno_type, "perplexity": figures["perplexity_after"]}
        row |= {"agreement": figures["top1_agreement"], "seconds": seconds}
        row |= {
            name: max(getattr(one, name) for one in reports) for name in ("l2_layer", "output_bound", "hankel_bound")
        }
        rows.append(row | {"pairs": converted.config.s4d_state_size // 2})
        models.append(converted)
    for row, one, spent in zip(rows, models, milliseconds(models, blocks[:1]), strict=True):
        row |= {"milliseconds": spent, "kibibytes": sum(state_bytes(one, after=512).values()) / 1024}
    for row, one in zip(rows[1:], models[1:], strict=True):
        row |= measured(model, one)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--dataset_name", required=True)
    parser.add_argument("--dataset_config_name", default="wikitext-2-v1")
    parser.add_argument("--orders", type=int, nargs="+", default=[32, 16, 8, 4])
    parser.add_argument("--block_size", type=int, default=512)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--output_file", type=Path)
    args = parser.parse_args()
    rows = measure(args)
    if args.output_file:
        write_json(args.output_file, rows)
    sys.stdout.writelines(f"{row}\n" for row in rows)


if __name__ == "__main__":
    main()
