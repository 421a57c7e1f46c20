"""Measure perplexity and bits per byte of language models on a text, by the length of the rows they read.

Every length scores the same tokens, all but the first, given the tokens before them in their row. With
--stride S, rows begin every S tokens, and only their last S tokens are scored. Rows longer than --tokens_per_pass are
read in parts with a cache. Bits per byte count the bytes of the scored tokens; their 95% intervals are over the
documents of the text. The loss by the number of tokens before a token, at the largest length, shows whether a model
uses its context.

Masked language models (--objective mlm) are scored on hidden tokens, the same ones at every length.

--config_overrides changes fields of the models as they are loaded, such as fd_resolution for a finer grid.

Example:
    python scripts/evaluate_lm.py --model_name_or_path outputs/wikitext2 --dataset_name Salesforce/wikitext \\
        --dataset_config_name wikitext-2-v1 --lengths 512 1024 2048 4096 14336 --output_dir outputs/lengths
    python scripts/evaluate_lm.py --model_name_or_path outputs/a outputs/b --validation_file book.txt --stride 256 \\
        --output_dir outputs/lengths
    python scripts/evaluate_lm.py --objective mlm --model_name_or_path outputs/masked --validation_file book.txt \\
        --lengths 128 512 2048 --output_dir outputs/masked-lengths
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tnn_programs.cli.errors import importing, report_errors

from tnn_programs.cli.model_path import check_model_path
from tnn_programs.cli.parser import check_counts, option, parse_arguments, require
from tnn_programs.cli.text_files import check_file, check_source


@dataclass
class EvaluateArguments:
    """The options of the evaluation."""

    model_name_or_path: list[str]
    output_dir: Path
    objective: Literal["clm", "mlm"] = "clm"
    mlm_probability: float = 0.15
    seed: int = 0
    config_overrides: str | None = None
    validation_file: str | None = None
    dataset_name: str | None = None
    dataset_config_name: str | None = None
    split: str = option("test", "Split of the data set.")
    text_column: str = "text"
    documents: str | None = None
    lengths: list[int] = option([512, 1024, 2048, 4096, 8192, 14336])
    stride: int | None = option(None, "Also evaluate with rows that begin every N tokens.")
    max_tokens: int | None = option(None, "Read only the first N tokens of the text.")
    tokens_per_pass: int = option(4096, "Tokens in a forward pass; limits memory.")
    dtype: str = "auto"
    device: str | None = None
    trust_remote_code: bool = False

    def __post_init__(self):
        for name in self.model_name_or_path:
            check_model_path(name, tokenizer=True)
        if (self.validation_file is None) == (self.dataset_name is None):
            raise ValueError("either --validation_file or --dataset_name must be given, and not both")
        shortest, stride = min(self.lengths), self.stride
        if shortest < 2:
            raise ValueError(f"--lengths must be at least 2, got {shortest}")
        if self.objective == "mlm" and stride is not None:
            raise ValueError(f"--stride must not be given with --objective mlm (rows do not overlap), got {stride}")
        require(self, "mlm_probability", 0 < self.mlm_probability < 1, "in (0, 1)")
        check_counts(self, "tokens_per_pass", "max_tokens")
        fits = stride is None or 1 <= stride < shortest
        require(self, "stride", fits, "at least 1 and below the smallest of --lengths")
        if self.validation_file is not None:
            check_file(self.validation_file, whole=False)
        else:
            check_source(self.dataset_name)


@report_errors
def main():
    (args,) = parse_arguments([EvaluateArguments], __doc__)
    with importing("training"):
        from tnn_programs.training.evaluate_lm import run
    run(args)


if __name__ == "__main__":
    main()
