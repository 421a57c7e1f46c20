"""Write the tables of figures in the pages and the README, from JSON files.

A page has a table between `<!-- table NAME -->` and `<!-- end -->`. The file docs/research/figures/NAME.json holds:

    columns             title -> template of a cell over the keys of a row, such as "{perplexity:.1f}"
    rows                one dict for each; a missing key leaves its cells empty
    date, commit, machine, seeds, note, command, as many as are known: written below the table. The commit is the one
                        that recorded the figures; several commands are a list
    bytes_per_token     of the text that was scored, for the format "bits"

A value in a row is a number, a text, a list (one value for each seed, or for each part of the cell), or a selection of
another table, {"from": NAME, "where": {KEY: VALUE or [VALUES]}, "value": KEY}. A table of which README shows a part is
a file with "from", "where" and columns of its own instead of rows. What a program wrote stands in a folder below
`figures/` ("from": "h100/gpu"), as it was or with the rows that the tables need. The parts of the
benchmark `gpu` are rows with the key "part".

Formats are those of Python, with one or two words before them: "bits" turns perplexity into bits per byte, "mean"
and "max" take the mean and the largest value of a list, "range" adds its smallest and largest value to the mean.
Otherwise a list is shown side by side, and "{key[0]}" is its first value.

A new row is a line in the JSON file.

Example:
    python docs/research/page_tables.py
"""

import json
import math
import re
import statistics
from pathlib import Path
from string import Formatter

from tabulate import tabulate

ROOT = Path(__file__).parents[2]
FIGURES = Path(__file__).parent / "figures"
TABLE = re.compile(r"(<!-- table ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
FORMAT = re.compile(r"(bits)?(mean|max|range)?(.*)")


class Cells(Formatter):
    """`str.format` for lists of values and for bits per byte."""

    def __init__(self, bytes_per_token: float | None):
        self.bytes_per_token = bytes_per_token

    def format_field(self, value, format_spec: str) -> str:
        if isinstance(value, str):
            return value
        bits, summary, number = FORMAT.fullmatch(format_spec).groups()
        values = value if isinstance(value, list) else [value]
        if bits:
            values = [math.log2(perplexity) / self.bytes_per_token for perplexity in values]
        if not summary:
            return " / ".join(one if isinstance(one, str) else format(one, number) for one in values)
        if summary == "max":
            return format(max(values), number)
        mean = format(statistics.mean(values), number)
        return mean if summary == "mean" else f"{mean} ({min(values):{number}} to {max(values):{number}})"


def load(name: str) -> dict:
    """A file of figures with its rows, those of another table if it shows a part of one.

    Raises:
        ValueError: a selection finds nothing.
    """
    figures = json.loads((FIGURES / f"{name}.json").read_text(encoding="utf-8"))
    if "parts" in figures:
        figures["rows"] = [{"part": part["part"]} | row for part in figures["parts"] for row in part["rows"]]
    if "from" in figures:
        other = load(figures["from"])
        return {"bytes_per_token": other.get("bytes_per_token")} | figures | {"rows": select(other["rows"], figures)}
    figures["rows"] = [{key: resolve(value) for key, value in row.items()} for row in figures["rows"]]
    return figures


def resolve(value):
    """A value of a row, with what it selects of other tables in its place."""
    if isinstance(value, dict):
        found = [row[value["value"]] for row in select(load(value["from"])["rows"], value)]
        return found if len(found) > 1 else found[0]
    if isinstance(value, list):
        parts = [resolve(part) for part in value]
        return [one for part in parts for one in (part if isinstance(part, list) else [part])]
    return value


def select(rows: list[dict], selection: dict) -> list[dict]:
    """The rows that have the values of `where`."""
    wanted = {key: value if isinstance(value, list) else [value] for key, value in selection["where"].items()}
    found = [row for row in rows if all(row.get(key) in values for key, values in wanted.items())]
    if not found:
        raise ValueError(f"{selection['from']}.json must have a row with {selection['where']}, got none.")
    return found


def table(name: str) -> str:
    """Markdown: the table, and below it where its figures are from.

    Raises:
        ValueError: a template names a key that no row has.
    """
    figures = load(name)
    rows, columns = figures["rows"], figures["columns"]
    keys = {title: keys_of(template) for title, template in columns.items()}
    unknown = {key for own in keys.values() for key in own} - {key for row in rows for key in row}
    if unknown:
        raise ValueError(f"{name}.json: the templates must name keys of the rows, got {', '.join(sorted(unknown))}.")
    cells = Cells(figures.get("bytes_per_token"))
    lines = [
        [cells.vformat(columns[title], (), row) if keys[title] <= row.keys() else "" for title in columns]
        for row in rows
    ]
    sides = [side(column) for column in zip(*lines, strict=True)]
    markdown = tabulate(lines, list(columns), "pipe", disable_numparse=True, colalign=sides)
    return "\n\n".join([markdown, *origin(figures)])


def side(cells: tuple[str, ...]) -> str:
    """Return the alignment of a column: numbers on the right."""
    filled = [cell for cell in cells if cell]
    return "right" if 2 * sum(cell[0].isdigit() for cell in filled) > len(filled) else "left"


def keys_of(template: str) -> set[str]:
    """Of the row, those inside formats too."""
    fields = [(name, spec) for _, name, spec, _ in Formatter().parse(template) if name]
    return {name.partition("[")[0] for name, _ in fields} | {key for _, spec in fields for key in keys_of(spec)}


def origin(figures: dict) -> list[str]:
    """Return the date, machine and command of the figures as paragraphs."""
    seeds = " and ".join(map(str, figures.get("seeds", [])))
    parts = [
        figures.get("date", "") + (f" (commit {figures['commit']})" if "commit" in figures else ""),
        figures.get("machine"),
        seeds and f"seed{'s' if len(figures['seeds']) > 1 else ''} {seeds}",
    ]
    measured = ", ".join(part for part in parts if part)
    text = " ".join(part for part in (measured and f"Measured: {measured}.", figures.get("note")) if part)
    commands = figures.get("command", [])
    code = "\n".join([commands] if isinstance(commands, str) else commands)
    return [part for part in (text, code and f"```bash\n{code}\n```") if part]


def pages_with_tables() -> list[Path]:
    files = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [file for file in files if TABLE.search(file.read_text(encoding="utf-8"))]


def with_tables(page: Path) -> str:
    """The text of a page with its tables written anew."""
    text = page.read_text(encoding="utf-8")
    return TABLE.sub(lambda match: f"{match[1]}\n{table(match[2])}\n\n{match[3]}", text)


def main():
    for page in pages_with_tables():
        page.write_text(with_tables(page), encoding="utf-8")


if __name__ == "__main__":
    main()
