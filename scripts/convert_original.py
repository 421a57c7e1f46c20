"""Convert a checkpoint of the released TNN, FD, SKI, RTF, HyenaDNA or Evo 2 to a folder that `from_pretrained` loads.

Every tensor of the checkpoint goes to the model, or the report says why it does not. Every parameter of the model gets
a value. Files are `.safetensors`, or `.pt` and `.ckpt` as fairseq and Lightning write them; of HyenaDNA and Evo 2, the
folder or its name on the Hub. A file in parts, X.pt.part0 and so on, is joined in the output folder for the time.
Only tensors and plain options are read. A pickle with other objects is refused, because reading it would run its code.

Example:
    python scripts/convert_original.py checkpoint_best.pt outputs/converted --architecture tnn_v2_decay_99_pre
    python scripts/convert_original.py model.safetensors outputs/converted --architecture roberta_tnn_v2_decay_99 \\
        --hparams hparams.json
    python scripts/convert_original.py last.safetensors outputs/converted --architecture rtf-listops
    python scripts/convert_original.py hyenadna-small-32k-seqlen-hf outputs/converted --architecture hyenadna
    python scripts/convert_original.py evo2_7b.pt outputs/evo2 --architecture evo2-7b-1m --dtype bfloat16
"""

import argparse
import json
import sys
from pathlib import Path

from tnn_programs.cli.errors import importing, report_errors

import yaml

from tnn_programs.cli.atomic import check_overwriting, claim, new_files, write_json
from tnn_programs.cli.declared import NAMES
from tnn_programs.cli.model_path import naming
from tnn_programs.cli.parser import ProgramParser, Values

DTYPES = ("float32", "bfloat16", "float16")
ARCHITECTURES, HEADS = (NAMES[f"tnn_programs.original.architectures.{name}"] for name in ("ARCHITECTURES", "HEADS"))


def parse_arguments() -> argparse.Namespace:
    parser = ProgramParser(description=__doc__)
    parser.add_argument(
        "checkpoint", type=Path, help="Checkpoint: .safetensors, .pt or .ckpt, or a folder or repository of the Hub."
    )
    parser.add_argument("output_dir", type=Path, help="Folder for the model and the report.")
    parser.add_argument("--architecture", required=True, choices=ARCHITECTURES, help="Name of the architecture.")
    parser.add_argument("--overwrite_output_dir", action="store_true")
    parser.add_argument("--hparams", type=Path, help="JSON or YAML of official options that differ from its defaults.")
    parser.add_argument("--dtype", choices=DTYPES, help="Dtype of the weights, if not that of the checkpoint.")
    parser.add_argument("--head", choices=HEADS, help="Head, if not that of the architecture.")
    parser.add_argument("--published_ski", action="store_true", help="Let SKI interpolate as published, not released.")
    parser.add_argument("--allow_fp8", action="store_true", help="Convert models of Evo 2 that were trained in FP8.")
    args = parser.parse_args()
    for file in filter(None, (args.checkpoint, args.hparams)):
        others = file is args.checkpoint and (is_repository(file) or Path(f"{file}.part0").exists())
        if not file.exists() and not others:
            raise FileNotFoundError(f"The file {file} does not exist.")
    return args


def is_repository(checkpoint: Path) -> bool:
    """Whether a checkpoint is a repository of the Hub, OWNER/NAME, and not a file."""
    files = (".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".part")
    suffix = checkpoint.suffix.rstrip("0123456789")  # of a part: .part0
    return not checkpoint.exists() and len(checkpoint.parts) == 2 and suffix not in files


def read_options(file: Path) -> dict:
    """The options in a file of JSON or YAML; ValueError without a mapping, or with aliases, which may expand."""
    try:
        text, is_yaml = file.read_text(encoding="utf-8"), file.suffix in (".yaml", ".yml")
        content = yaml.load(text, Values) if is_yaml else json.loads(text)  # noqa: S506 - a SafeLoader
        aliases = is_yaml and any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text))
        if aliases or not isinstance(content, dict):
            raise ValueError(f"it holds a {type(content).__name__} or aliases")
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"--hparams must be a JSON object or a YAML mapping, got {file}: {reason}") from error
    return content


def run(args: argparse.Namespace):
    """Convert the checkpoint, save the model and the report, and say what became of the tensors."""
    with importing("scripts"):
        import torch

        from tnn_programs.original import conversion
    checkpoint = args.checkpoint
    if is_repository(checkpoint):
        with naming(checkpoint, "checkpoint", ()):
            checkpoint = conversion.fetch(checkpoint.as_posix())
    try:
        tensors, options = conversion.read_checkpoint(checkpoint, args.output_dir)
        options |= {} if args.hparams is None else read_options(args.hparams)
        options |= {"allow_fp8": True} if args.allow_fp8 else {}
        model, report = conversion.convert(tensors, options, args.architecture, args.head, args.published_ski)
        if args.dtype is not None:
            model.to(getattr(torch, args.dtype))
    except (ValueError, OSError, ImportError):
        raise
    except Exception as error:  # names, options and shapes of any kind may be in a file
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise ValueError(
            f"{checkpoint} and its options must be those of the released {args.architecture}, got what cannot be read "
            f"as such ({reason})"
        ) from error
    with new_files(args.output_dir) as folder:
        model.save_pretrained(folder, max_shard_size="2GB")
        if (tokenizer := conversion.ARCHITECTURES[args.architecture].tokenizer) is not None:
            tokenizer(model.config.max_position_embeddings).save_pretrained(folder)
        write_json(folder / "original.json", json.loads(json.dumps(report, default=str)))
    for warning in report["warnings"]:
        sys.stderr.write(f"warning: {warning}\n")
    left_out = sum(became.startswith("left out") for became in report["tensors"].values())
    sys.stdout.write(
        f"{type(model).__name__} with {model.num_parameters():,} parameters from {len(tensors)} tensors; {left_out} "
        f"left out (original.json says why); saved in {args.output_dir}\n"
    )


@report_errors
def main():
    args = parse_arguments()
    with claim(args.output_dir):
        check_overwriting(args.output_dir, args.overwrite_output_dir, args.checkpoint)
        run(args)


if __name__ == "__main__":
    main()
