"""Train a small TNN language model on real text, save it, load it back and let it continue a prompt.

Example:
    python scripts/demo.py --max_steps 300 --prompt "In the beginning"
    python scripts/demo.py --dataset_name my_book.txt --tno_type rtf
    python scripts/demo.py --serve
"""

from dataclasses import dataclass

from tnn_cli.errors import importing, report_errors

from tnn_cli.declared import declared_keys
from tnn_cli.model_path import find_config, nearest
from tnn_cli.parser import option, parse_arguments
from tnn_cli.text_files import check_source

OPERATORS = declared_keys("modeling_tnn.configuration_tnn", "DIRECTIONS")


@dataclass
class DemoArguments:
    """The options of the demo."""

    config_name: str = "tnn-tiny"
    tno_type: str | None = None
    dataset_name: str | None = None
    dataset_config_name: str | None = None
    documents: str | None = None
    output_dir: str = "outputs/demo"
    overwrite_output_dir: bool = False
    max_steps: int = 300
    per_device_train_batch_size: int = 16
    learning_rate: float = 4e-3
    prompt: str = "And God said unto"
    max_new_tokens: int = 60
    seed: int = 0
    serve: bool = option(False, "Then serve a page with the model, as tnn serve does.")

    def __post_init__(self):
        find_config(self.config_name)
        if self.tno_type is not None and self.tno_type not in OPERATORS:
            hint = nearest(self.tno_type, OPERATORS)
            raise ValueError(f"--tno_type must be one of {', '.join(OPERATORS)}, got {self.tno_type}{hint}")
        if self.dataset_name is not None:
            check_source(self.dataset_name)


@report_errors
def main():
    (args,) = parse_arguments([DemoArguments], __doc__)
    with importing("demo"):
        from modeling_tnn.training.demo import start
    start(args)


if __name__ == "__main__":
    main()
