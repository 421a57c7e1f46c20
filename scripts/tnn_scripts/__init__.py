"""The former name of the programs and their library, until 0.2."""

raise ImportError(
    "tnn_scripts is gone: its programs are tnn_cli.programs (`accelerate launch -m tnn_cli.programs.pretrain`), "
    "their options tnn_cli, and their library modeling_tnn.training, .data, .original, .plotting, .serving, .tools "
    "and .benchmarks"
)
