"""Train variants of a small language model by one recipe and compare their validation perplexity.

A variant is `name` or `name:field=value,field=value`, with the fields of the configuration that it changes. Causal
models predict the next token, bidirectional models (causal=false) predict masked tokens. All models are scored on the
same tokens at every length, and masked models with the same masks. configuration/recipes/ablations/ has one recipe
for each table of ablations of the papers.

Example:
    python scripts/run_ablation.py --recipe ablations/rpe-input --output_dir outputs/input
    python scripts/run_ablation.py --output_dir outputs/decay --variants "0.9:decay=0.9" "0.99:decay=0.99"
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tnn_programs.cli.errors import report_errors

from tnn_programs.cli.declared import start
from tnn_programs.cli.model_path import find_config
from tnn_programs.cli.parser import load_config
from tnn_programs.cli.task_arguments import ComparisonArguments

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(kw_only=True)
class AblationArguments(ComparisonArguments):
    """The variants and the settings that they share."""

    variants: list[str]
    config_name: str = "tnn-tiny"

    def __post_init__(self):
        super().__post_init__()
        find_config(self.config_name)
        for variant in self.variants:
            self.variant_config(variant)

    def build(self, fields: dict) -> "PreTrainedConfig":
        return load_config(self.config_name, fields)


@report_errors
def main():
    start(AblationArguments, __doc__, "run_ablation")


if __name__ == "__main__":
    main()
