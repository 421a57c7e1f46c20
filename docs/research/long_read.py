"""Measure memory and time of reading a long sequence, in one pass or in chunks, and compare it with a short pass.

The model has random weights, from a preset whose filter gets as many positions as are read. A causal model gives the
first positions of a long pass the logits of a pass over these alone, which is computed in float64: `error` is the
largest difference relative to the largest logit. With --chunk, a cache continues; give a --prefix beyond a chunk. With
--embed, the model reads the sequence as one vector by `embed_texts`.

Example:
    OMP_NUM_THREADS=1 python docs/research/long_read.py --positions 1000000
    OMP_NUM_THREADS=1 python docs/research/long_read.py --positions 1000000 --chunk 131072
    OMP_NUM_THREADS=1 python docs/research/long_read.py --preset tnn-tiny --embed --chunk 4096
"""

import argparse
import json
import resource
import sys
import time
from pathlib import Path

import torch
from transformers import PreTrainedModel

from modeling_tnn import TnnConfig, TnnForCausalLM, embed_texts
from tnn_programs.cli.parser import parse_overrides

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
def read(model: PreTrainedModel, args: argparse.Namespace) -> dict:
    """The figures of reading random tokens, the first of which are read again unless the outputs are a vector."""
    ids = torch.randint(model.config.vocab_size, (1, args.positions))
    before, starts = peak(), (time.perf_counter(), time.process_time())
    outputs = embed_texts(model.model, ids, chunk_size=args.chunk) if args.embed else logits_of(model, ids, args.chunk)
    figures = {"positions": args.positions, "chunk": args.chunk, "seconds": time.perf_counter() - starts[0]}
    figures |= {"cpu_seconds": time.process_time() - starts[1], "peak_gib": peak(), "gib_before": before}
    if args.embed:
        return figures
    alone = model.double()(ids[:, : args.prefix], use_cache=False).logits
    error = (outputs[:, : args.prefix] - alone).abs().max() / alone.abs().max()
    return figures | {"prefix": args.prefix, "error": float(error)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="hyenadna-small-32k", help="A folder of configuration/.")
    parser.add_argument("--positions", type=int, default=1_000_000)
    parser.add_argument("--chunk", type=int, help="Number of positions to read at once; without it, all.")
    parser.add_argument("--prefix", type=int, default=20_000, help="Number of first positions to read again.")
    parser.add_argument("--embed", action="store_true", help="Read one vector, in chunks of --chunk.")
    parser.add_argument("--config_overrides", help="Fields of the preset to change: name=value,name=value.")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    settings = json.loads((ROOT / "configuration" / args.preset / "config.json").read_text())
    given = {"hyena_filter_length": args.positions} | parse_overrides(args.config_overrides)
    model = TnnForCausalLM(TnnConfig(**settings | given)).eval()
    sys.stdout.write(json.dumps(read(model, args)) + "\n")


if __name__ == "__main__":
    main()
