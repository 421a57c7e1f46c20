"""README and documentation tell the truth: examples run, commands and options exist, links lead somewhere, and what is
generated is what the code says.
"""

import json
import re
import shlex
import sys
from importlib import import_module
from pathlib import Path

import pytest
import yaml
from transformers import GenerationConfig

from helpers import processes
from helpers.models import slow
from helpers.scripts import ROOT, save_model
from tnn_cli.commands import COMMAND_OF, COMMANDS
from tnn_cli.model_path import find_recipe

PAGES = ROOT / "docs"
FILES = (*ROOT.glob("*.md"), *PAGES.rglob("*.md"), *ROOT.glob("configuration/*.md"), ROOT / "model_cards/README.md")
DOCUMENTS = {path.relative_to(ROOT).as_posix(): path.read_text() for path in FILES}
sys.path += [str(ROOT / "docs" / folder) for folder in ("site", "research")]
generate, page_tables = import_module("generate"), import_module("page_tables")

# What a guide says that its reader has, after a small model.
MODEL = """
from transformers import TrainingArguments
import torch, modeling_tnn
model = modeling_tnn.TnnForCausalLM(modeling_tnn.TnnConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1))
args = TrainingArguments("out", max_steps=1, report_to="none", use_cpu=True)
"""
GIVEN = {
    "docs/guides/data.md": f"""{MODEL}
documents = [{{"input_ids": [1, 2, 3]}}, {{"input_ids": [4, 5]}}] * 4
""",
    "docs/guides/parallel.md": f"""{MODEL}
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
ids, optimizer = torch.arange(9)[None], torch.optim.SGD(model.parameters())
""",
    "docs/guides/finetune.md": f"{MODEL}texts = []\n",
}


def blocks(document: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", DOCUMENTS[document], flags=re.DOTALL)


@pytest.mark.parametrize(
    "documents", [["README.md"], *slow([one for one in DOCUMENTS if one != "README.md"])], ids=["README", "others"]
)
def test_examples_run(documents, tmp_path):
    """The Python of each page, in order; all pages in one process after `tnn demo`, each with names of its own."""
    save_model(tmp_path / "outputs" / "demo", tno_type="rpe", decay=0.9)
    pages, expected = [], []
    for document in documents:
        code = [GIVEN.get(document, ""), *blocks(document, "python")]
        if "gaussian_operator.py" in DOCUMENTS[document]:
            (tmp_path / "gaussian_operator.py").write_text("\n".join(code[:3]))
            code = code[3:]
        pages.append((document, "\n".join(code)))
        expected += re.findall(r"print\(.*\)  # (.*)", "\n".join(code))
    assert expected
    (tmp_path / "pages.json").write_text(json.dumps(pages))
    code = "import json, sys\nsys.path.append(sys.argv[1])\n"
    code += "for name, code in json.load(open('pages.json')):\n    exec(compile(code, name, 'exec'), {})\n"
    done = processes.run([sys.executable, "-c", code, ROOT / "tests"], check=True, cwd=tmp_path)
    assert all(line in done.stdout for line in expected)


def commands(document: str) -> list[list[str]]:
    """The commands of `tnn` and of the programs, as words; comments and continued lines are put right."""
    lines = "\n".join(blocks(document, "bash")).replace("\\\n", " ").splitlines()
    found = [shlex.split(line, comments=True) for line in lines]
    return [words for words in found if words and (words[0] == "tnn" or "scripts/" in " ".join(words))]


def test_options_of_commands_exist():
    known = {command: {f"--{name}" for name in generate.parser_of(command).option_names()} for command in COMMANDS}
    known["generate"] |= {f"--{name}" for name in GenerationConfig().to_dict()}
    for words in (words for document in DOCUMENTS for words in commands(document)):
        script = next((word for word in words if word.startswith("scripts/")), None)
        command = words[1] if script is None else COMMAND_OF[Path(script).stem]
        after = words[words.index(script or command) + 1 :]
        given = {word.partition("=")[0] for word in after if word.startswith("--")} - {"--help"}
        assert given <= known[command], words
        for name, value in zip(after, after[1:], strict=False):
            assert name != "--recipe" or find_recipe(value).is_file(), words


def test_files_in_links_and_commands_exist():
    for document, text in DOCUMENTS.items():
        text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
        for target in re.findall(r"\]\((?!http)([^)#]+)(?:#[^)]*)?\)", text):
            assert (ROOT / document).parent.joinpath(target).exists(), (document, target)
        for file in re.findall(r"\b(?:scripts|configuration)/[\w./-]+\w", "\n".join(blocks(document, "bash"))):
            assert (ROOT / file).exists(), (document, file)


def test_names_that_pages_have_exist():
    """Names of the API, where they say; `test_file.py`, or `test_file.py::test_name`; targets of make."""
    for module, name in re.findall(r"^::: (\S+)\.(\w+)$", DOCUMENTS["docs/reference/api.md"], flags=re.MULTILINE):
        assert getattr(import_module(module), name).__module__ in (module, f"{module}.presets")
    files = {path.name: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    files["test_gaussian.py"] = "def "  # what the page on operators lets its reader write
    named = set(re.findall(r"(test_\w+\.py)(?:::(\w+))?", "\n".join(DOCUMENTS.values())))
    assert not {(file, name) for file, name in named if f"def {name}" not in files.get(file, "")}
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert set(re.findall(r"`make ([\w-]+)", DOCUMENTS["README.md"] + DOCUMENTS["CONTRIBUTING.md"])) <= targets


def test_generated_pages_and_tables():
    """`python docs/site/generate.py` writes them. No table of bare numbers is typed by hand, and all are shown."""
    for page, content in generate.GENERATED.items():
        assert (generate.PAGES / page).read_text() == generate.NOTE + content(), page
    for page in page_tables.pages_with_tables():
        assert page.read_text() == page_tables.with_tables(page), page
    for document in ("README.md", *(f"docs/{page}.md" for page in ("research/benchmarks", "research/results"))):
        typed = page_tables.TABLE.sub("", DOCUMENTS[document])
        rows = [row for row in re.findall(r"^\|.*\d.*\|$", typed, flags=re.MULTILINE) if "`" not in row]
        assert not [row for row in rows if re.search(r"\| *-?[\d,.]+%? *\|", row)], document
    shown = [name for document in DOCUMENTS.values() for _, name, _ in page_tables.TABLE.findall(document)]
    assert sorted(shown) == sorted(file.stem for file in page_tables.FIGURES.glob("*.json"))


def test_the_picture_of_the_files_does_not_depend_on_the_order_of_sets(tmp_path, monkeypatch):
    """`make docs` leaves a clean clone clean: a set of names has another order in each process."""
    draw, drawn = import_module("draw"), set()
    imported = {name: sorted(below) for name, below in draw.imports().items()}
    monkeypatch.setattr(draw, "PICTURES", tmp_path)
    for step in (1, -1):
        monkeypatch.setattr(draw, "imports", lambda step=step: {name: imported[name][::step] for name in imported})
        draw.draw_architecture()
        drawn.add((tmp_path / "architecture.png").read_bytes())
    assert len(drawn) == 1


@pytest.fixture
def figures(tmp_path, monkeypatch):
    """Writes a file of figures."""
    monkeypatch.setattr(page_tables, "FIGURES", tmp_path)
    return lambda name, **content: (tmp_path / f"{name}.json").write_text(json.dumps(content))


def test_cells_of_a_table(figures):
    rows = [{"model": "a", "seeds": [3.0, 5.0], "perplexity": 16.0}, {"model": "b", "perplexity": 4}]
    columns = {"model": "{model}", "all": "{seeds:.0f}", "range": "{seeds:range.1f}", "bits": "{perplexity:bits.2f}"}
    figures("one", columns=columns, rows=rows, bytes_per_token=2, date="today", seeds=[0, 1], command="tnn demo")
    table, origin, command = page_tables.table("one").split("\n\n")
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    assert cells == [["a", "3 / 5", "4.0 (3.0 to 5.0)", "2.00"], ["b", "", "", "1.00"]]
    assert origin == "Measured: today, seeds 0 and 1." and command == "```bash\ntnn demo\n```"
    figures("part", **{"from": "one", "where": {"model": "b"}, "columns": {"bits": "{perplexity:bits.1f}"}})
    assert "1.0" in page_tables.table("part") and "2.0" not in page_tables.table("part")
    chosen = {"from": "one", "where": {"model": ["a", "b"]}, "value": "perplexity"}
    columns = {"all": "{all:.0f}", "second": "{all[1]:.1f}", "largest": "{all:max.2f}"}
    figures("other", columns=columns, rows=[{"all": [chosen, 1]}])
    last = page_tables.table("other").splitlines()[2]
    assert [cell.strip() for cell in last.split("|")[1:-1]] == ["16 / 4 / 1", "4.0", "16.00"]


def test_figures_of_parts_and_those_that_are_not_there(figures):
    """Parts of the benchmark of a GPU are rows."""
    chosen = {"from": "gpu", "where": {"part": "training", "way": "fused"}, "value": "ms"}
    figures("one", columns={"ms": "{ms:.1f}"}, rows=[{"ms": chosen}])
    figures("gpu", parts=[{"part": "training", "rows": [{"way": "fused", "ms": 2}]}, {"part": "memory", "rows": []}])
    assert "|  2.0 |" in page_tables.table("one")
    figures("one", columns={"model": "{modle}"}, rows=[{"model": "a"}])
    figures("part", **{"from": "one", "where": {"model": "c"}, "columns": {}})
    with pytest.raises(ValueError, match="one.json: the templates must name keys of the rows, got modle"):
        page_tables.table("one")
    with pytest.raises(ValueError, match="one.json must have a row"):
        page_tables.table("part")


def test_every_page_is_in_the_navigation():
    def leaves(entry) -> list[str]:
        parts = entry.values() if isinstance(entry, dict) else entry
        return [entry] if isinstance(entry, str) else [leaf for part in parts for leaf in leaves(part)]

    nav = yaml.safe_load((ROOT / "docs" / "site" / "mkdocs.yml").read_text())["nav"]
    assert sorted(leaves(nav)) == sorted(path.relative_to(PAGES).as_posix() for path in PAGES.rglob("*.md"))
