"""Links of a page to files outside the pages lead to the repository."""

import re
from pathlib import Path

PAGES = Path(__file__).parent / "pages"
ROOT = PAGES.parents[1]


def on_page_markdown(markdown: str, page, config, files) -> str:
    """Called by mkdocs for each page."""
    folder = (PAGES / page.file.src_path).parent

    def rewritten(match: re.Match) -> str:
        target = (folder / match[1]).resolve()
        if target.is_relative_to(PAGES) or not target.exists():
            return match[0]
        return f"]({config.repo_url}/blob/main/{target.relative_to(ROOT).as_posix()})"

    return re.sub(r"\]\((?!https?:|#)([^)#]+)\)", rewritten, markdown)
