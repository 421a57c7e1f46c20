"""Write the Triton product as a kernel of the Hub: a folder that the library kernels loads and that needs no build.

With it, `kernelize` changes the Toeplitz product of any TNN, also of a checkpoint that was loaded by
trust_remote_code=True. The folder has its own copy of the kernels, and needs PyTorch and Triton alone.

Example:
    python scripts/hub_kernel.py --output_dir outputs/tnn-toeplitz
"""

import argparse
import hashlib
import shutil
import sys
from pathlib import Path

from tnn_scripts.common.errors import importing, report_errors

from tnn_scripts.common.atomic import claim, new_folder, write_json, write_text
from tnn_scripts.common.declared import module_file
from tnn_scripts.common.parser import ProgramParser

NAME, VERSION, LICENSE = "tnn-toeplitz", 1, "apache-2.0"

# The file of the layers, and what the library calls it.
LAYERS = module_file("modeling_tnn.toeplitz_hub")
INIT = f'"""Gated Toeplitz products in Triton."""\n\nfrom . import {LAYERS.stem} as layers\n\n__all__ = ["layers"]\n'

CARD = f"""---
library_name: kernels
license: {LICENSE}
---

# {NAME}

The layer `ToeplitzProduct` computes the gated Toeplitz products of Toeplitz neural networks in Triton, forward and
backward. It takes float32, bfloat16 and float16, and filters up to 4,096 taps. The model computes the rest itself.
"""


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = ProgramParser(description=__doc__)
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument(
        "--backends",
        nargs="+",
        choices=("cuda", "cpu"),
        default=["cuda"],
        help="What the kernel is for. Triton's interpreter (TRITON_INTERPRET=1) needs cpu; it is for tests.",
    )
    return parser.parse_args(arguments)


def write_variant(folder: Path, backend: str):
    """The files for a backend. The id in the metadata, their name in Python, is another one for other code."""
    with importing():
        from transformers.dynamic_module_utils import get_relative_import_files
    files = sorted(map(Path, {str(LAYERS), *get_relative_import_files(LAYERS)}))
    folder.mkdir(parents=True)
    for file in files:
        shutil.copy(file, folder)
    write_text(folder / "__init__.py", INIT)
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]
    metadata = {
        "id": f"{NAME}-{backend}-{digest}".replace("-", "_"),
        "name": NAME,
        "version": VERSION,
        "license": LICENSE,
        "python-depends": [],
        "backend": {"type": backend},
    }
    write_json(folder / "metadata.json", metadata)


def run(args: argparse.Namespace):
    """Write the folder, and say how a model is loaded with it."""
    with new_folder(args.output_dir / "build") as build:
        for backend in args.backends:
            write_variant(build / f"torch-{backend}", backend)
    write_text(args.output_dir / "README.md", CARD)
    written = ", ".join(f"build/torch-{backend}" for backend in args.backends)
    sys.stdout.write(f"{args.output_dir}: {written}. Its layer is ToeplitzProduct.\n")


@report_errors
def main():
    args = parse_arguments(sys.argv[1:])
    with claim(args.output_dir):
        run(args)


if __name__ == "__main__":
    main()
