"""Train a small TNN language model on real text, save it, load it back and let it continue a prompt.

Example:
    python scripts/demo.py --max_steps 300 --prompt "In the beginning"
    python scripts/demo.py --dataset_name my_book.txt --tno_type rtf
    python scripts/demo.py --serve
"""

from dataclasses import dataclass

from tnn_programs.cli.errors import importing, report_errors

from tnn_programs.cli.declared import NAMES
from tnn_programs.cli.model_path import nearest
from tnn_programs.cli.parser import option, parse_arguments
from tnn_programs.cli.serving_arguments import PageArguments
from tnn_programs.cli.training_arguments import PretrainArguments

OPERATORS = NAMES["modeling_tnn.configuration_tnn.DIRECTIONS"]


@dataclass
class DemoArguments:
    """The options of the demo."""

    config_name: str = "tnn-tiny"
    tno_type: str | None = None
    dataset_name: str | None = None
    dataset_config_name: str | None = None
    documents: str | None = None
    block_size: int | None = None
    output_dir: str = "outputs/demo"
    overwrite_output_dir: bool = False
    resume_from_checkpoint: str | None = None
    max_steps: int = 300
    per_device_train_batch_size: int = 16
    learning_rate: float = 4e-3
    prompt: str = "And God said unto"
    max_new_tokens: int = 60
    seed: int = 0
    serve: bool = option(False, "Then serve a page with the model, as tnn serve does.")

    def __post_init__(self):
        if self.tno_type is not None and self.tno_type not in OPERATORS:
            hint = nearest(self.tno_type, OPERATORS)
            raise ValueError(f"--tno_type must be one of {', '.join(OPERATORS)}, got {self.tno_type}{hint}")
        self.pretraining()

    def pretraining(self) -> PretrainArguments:
        """The options of `tnn pretrain` for the same training."""
        own = ("tno_type", "prompt", "max_new_tokens", "serve")
        given = {name: value for name, value in vars(self).items() if name not in own}
        for name in ("dataset_name", "dataset_config_name"):
            given[name] = [] if given[name] is None else [given[name]]
        overrides = None if self.tno_type is None else f"tno_type={self.tno_type}"
        return PretrainArguments(**given, config_overrides=overrides, torch_compile=False)


@report_errors
def main():
    (args,) = parse_arguments([DemoArguments], __doc__)
    with importing("demo"):
        from tnn_programs.training.demo import start
    if args.serve:
        from tnn_programs.serving import page

        page.import_gradio()  # without it, the demo ends before it trains
    start(args)
    if args.serve:
        page.serve(PageArguments(args.output_dir))


if __name__ == "__main__":
    main()
