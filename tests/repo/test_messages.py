"""The form of error messages: "`name` must be ..., got ...", in the package and in the programs."""

import ast
import re

from helpers.scripts import ROOT

FILES = sorted([*ROOT.glob("modeling_tnn/**/*.py"), *ROOT.glob("scripts/**/*.py")])
OLD_FORMS = re.compile(r"is not possible|: it must|, not \{|must be given\.$")


def text_of(node: ast.expr) -> str:
    """The text of a literal, with {} for the values in it; nothing for other expressions."""
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def messages(source: str) -> list[str]:
    raised = [node.exc for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Raise)]
    return [text_of(call.args[0]) for call in raised if isinstance(call, ast.Call) and call.args]


def is_right(message: str) -> bool:
    """What says what must be also shows the value, unless an option or argument is missing or too much."""
    shown = "must" not in message or re.search(r"must .*\bgot |must (not )?be given", message, re.DOTALL)
    return bool(shown) and not OLD_FORMS.search(message)


def test_what_must_be_and_what_was_given():
    found = [(path.name, message) for path in FILES for message in messages(path.read_text(encoding="utf-8"))]
    assert len(found) > 200 and not [(name, message) for name, message in found if not is_right(message)]


def test_messages_are_found():
    """The check sees literals and the values in them."""
    source = 'raise ValueError(f"`x` must be 1, " f"not {x}.")\nraise TypeError("a" "b") from None'
    assert messages(source) == ["`x` must be 1, not {}.", "ab"] and not is_right(messages(source)[0])
