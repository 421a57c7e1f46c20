"""Train, evaluate, serve and publish TNNs.

Example:
    tnn demo
    tnn pretrain --recipe wikitext2 --output_dir outputs/wikitext2
    tnn generate --model_name_or_path outputs/wikitext2 --prompt "The river"
"""

import sys
from importlib import import_module

from tnn_programs.cli.errors import report_errors

from tnn_programs.cli.commands import COMMANDS
from tnn_programs.cli.model_path import did_you_mean


def help_text() -> str:
    """The list of commands. It is fast, because it needs no torch."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {summary}" for name, (_, summary) in COMMANDS.items()]
    summary, example = __doc__.strip().split("\n\n")
    return "\n".join(
        ["usage: tnn COMMAND [options]", "", summary, "", example, "", "commands:", *lines, ""]
        + ["`tnn COMMAND --help` lists the options of a command; `tnn --version` prints the version.", ""]
    )


@report_errors
def main():
    """Run the program that the first argument names, with the other arguments."""
    command, *options = sys.argv[1:] or ["--help"]
    if command in ("-h", "--help"):
        sys.stdout.write(help_text())
    elif command == "--version":
        from importlib.metadata import version

        sys.stdout.write(f"modeling-tnn {version('modeling-tnn')}\n")
    elif command in COMMANDS:
        sys.argv = [f"tnn {command}", *options]
        import_module(f"tnn_programs.{COMMANDS[command][0]}").main()
    else:
        sys.stderr.write(f"error: {command} is no command of tnn{did_you_mean(command, COMMANDS)} See `tnn --help`.\n")
        sys.exit(2)


if __name__ == "__main__":
    main()
