"""Links to files of the repository as links to its page on the web, where the file itself is not at hand.

mkdocs calls `on_page_markdown` for each page of the site. As a program it rewrites a file, such as the README that
goes to PyPI.

Example:
    python docs/site/links.py build/export/README.md
"""

import argparse
import re
import tomllib
from pathlib import Path

PAGES = Path(__file__).parents[1]
ROOT = PAGES.parent
LINK = re.compile(r"(!?)\[([^][]*)\]\((?!https?:|#)([^)#]+)([^)]*)\)")


def on_page_markdown(markdown: str, page, config, files) -> str:
    """The page with links to what is not part of the site rewritten; one of no section has no column for sections."""
    if page.parent is None:
        page.meta["hide"] = ["navigation"]
    folder = (PAGES / page.file.src_path).parent
    return absolute_links(markdown, folder, config.repo_url, PAGES)


def absolute_links(markdown: str, folder: Path, repository: str, besides: Path | None = None) -> str:
    """`markdown` with links to the repository instead of relative ones.

    Args:
        folder: where the text stands, in the repository.
        repository: address of its page.
        besides: links into this folder stay.
    """

    def rewritten(match: re.Match) -> str:
        picture, text, path, anchor = match.groups()
        target = (folder / path).resolve()
        if not target.exists() or (besides is not None and target.is_relative_to(besides)):
            return match[0]
        kind = "raw" if picture else "blob"
        return f"{picture}[{text}]({repository}/{kind}/main/{target.relative_to(ROOT).as_posix()}{anchor})"

    return LINK.sub(rewritten, markdown)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="Markdown that stands at the top of the repository.")
    file = parser.parse_args().file
    repository = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]
    file.write_text(absolute_links(file.read_text(encoding="utf-8"), ROOT, repository), encoding="utf-8")


if __name__ == "__main__":
    main()
