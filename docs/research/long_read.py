"""Measure memory and time of reading a long sequence, in one pass or in chunks, and compare it with a short pass.

The model has random weights, from a preset whose filter gets as many positions as are read. A causal model gives the
first positions of a long pass the logits of a pass over these alone, which is computed in float64: `error` is the
largest difference relative to the largest logit. With --chunk, a cache continues; give a --prefix beyond a chunk.

Example:
    OMP_NUM_THREADS=1 python docs/research/long_read.py --positions 1000000
    OMP_NUM_THREADS=1 python docs/research/long_read.py --positions 1000000 --chunk 131072
"""

import argparse
import json
import resource
import sys
import time
from pathlib import Path

import torch
from transformers import PreTrainedModel

from modeling_tnn import TnnConfig, TnnForCausalLM

ROOT = Path(__file__).resolve().parents[2]


def peak() -> float:
    """The largest resident memory of this process so far, in GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def logits_of(model: PreTrainedModel, ids: torch.Tensor, chunk: int | None) -> torch.Tensor:
    """The logits `(1, L, V)` of one pass, or of chunks that continue a cache."""
    if chunk is None:
        return model(ids, use_cache=False).logits
    cache, parts = None, []
    for part in ids.split(chunk, dim=1):
        outputs = model(part, past_key_values=cache, use_cache=True)
        cache = outputs.past_key_values
        parts.append(outputs.logits)
    return torch.cat(parts, dim=1)


@torch.inference_mode()
def read(model: PreTrainedModel, prefix: int, chunk: int | None) -> dict:
    """The figures of reading `hyena_filter_length` random tokens, `prefix` of which are read again."""
    config = model.config
    ids = torch.randint(config.vocab_size, (1, config.hyena_filter_length))
    before, starts = peak(), (time.perf_counter(), time.process_time())
    logits = logits_of(model, ids, chunk)
    seconds, cpu_seconds, most = time.perf_counter() - starts[0], time.process_time() - starts[1], peak()
    alone = model.double()(ids[:, :prefix], use_cache=False).logits
    error = (logits[:, :prefix] - alone).abs().max() / alone.abs().max()
    figures = {"positions": ids.shape[1], "chunk": chunk, "seconds": seconds, "cpu_seconds": cpu_seconds}
    return figures | {"peak_gib": most, "gib_before": before, "prefix": prefix, "error": float(error)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="hyenadna-small-32k", help="A folder of configuration/.")
    parser.add_argument("--positions", type=int, default=1_000_000)
    parser.add_argument("--chunk", type=int, help="Number of positions to read at once; without it, all.")
    parser.add_argument("--prefix", type=int, default=20_000, help="Number of first positions to read again.")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    settings = json.loads((ROOT / "configuration" / args.preset / "config.json").read_text())
    model = TnnForCausalLM(TnnConfig(**settings | {"hyena_filter_length": args.positions})).eval()
    sys.stdout.write(json.dumps(read(model, args.prefix, args.chunk)) + "\n")


if __name__ == "__main__":
    main()
