"""README and documentation tell the truth: examples run, commands and options exist, links lead somewhere, and what is
generated is what the code says.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import time
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
import transformers
import yaml
from transformers import GenerationConfig

from helpers import processes
from helpers.models import slow
from helpers.scripts import ROOT, free_port, save_model
from tnn_programs.cli.commands import COMMAND_OF, COMMANDS
from tnn_programs.cli.declared import DECLARED, NAMES, trainer_arguments, training_options
from tnn_programs.cli.model_path import find_recipe

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
    "docs/guides/evo2.md": "from helpers.evo2_models import write_files\nwrite_files()\n",
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


@pytest.mark.slow
@pytest.mark.parametrize("notebook", sorted((PAGES / "notebooks").glob("*.py")), ids=lambda path: path.stem)
def test_notebooks_run(notebook, tmp_path):
    """Their assertions hold."""
    environment = os.environ | {"MAX_STEPS": "2", "MPLBACKEND": "Agg"}
    processes.run([sys.executable, notebook], check=True, cwd=tmp_path, env=environment)


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


def test_what_command_lines_are_checked_with(monkeypatch):
    """`declared.json` is as the program writes it; with another release of transformers, for our own names.

    An option that the installed release does not have is left out, and refused where it is given.
    """
    made = json.loads(json.dumps(generate.declared()))
    if f"transformers=={transformers.__version__}\n" in (ROOT / ".ci/constraints.txt").read_text():
        assert made == DECLARED
    for path, names in NAMES.items():
        assert path.startswith("transformers.") or made["names"][path] == names, path
    monkeypatch.delitem(transformers.TrainingArguments.__dataclass_fields__, "tf32")
    options = training_options(learning_rate=None, logging_steps=10)
    asked = trainer_arguments(options(output_dir="out", logging_steps=500, weight_decay=0.1, use_cpu=True))
    assert (asked.learning_rate, asked.logging_steps, asked.weight_decay) == (None, 500, 0.1)
    with pytest.raises(ValueError, match=f"--tf32 is not an option with transformers {transformers.__version__}"):
        trainer_arguments(options(tf32=True))


def test_every_page_is_in_the_navigation():
    def leaves(entry) -> list[str]:
        parts = entry.values() if isinstance(entry, dict) else entry
        return [entry] if isinstance(entry, str) else [leaf for part in parts for leaf in leaves(part)]

    nav = yaml.safe_load((ROOT / "docs" / "site" / "mkdocs.yml").read_text())["nav"]
    assert sorted(leaves(nav)) == sorted(path.relative_to(PAGES).as_posix() for path in PAGES.rglob("*.md"))


@pytest.mark.slow
def test_the_command_of_the_container_serves(tmp_path):
    """The Dockerfile of the page: what it copies and installs exists, and its command serves a model, with the key."""
    page = (ROOT / "docs/guides/deploy.md").read_text()
    lines = dict(line.split(" ", 1) for line in re.search(r"```dockerfile\n(.*?)```", page, re.DOTALL)[1].splitlines())
    extra = re.search(r"/src\[(\w+)\]", page)[1]
    assert extra in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    folder, port = save_model(tmp_path / "model"), free_port()
    given = {"/model": str(folder), "8000": str(port), "0.0.0.0": "127.0.0.1"}
    command = [given.get(word, word) for word in json.loads(lines["CMD"])]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TNN_API_KEY": "k" * 20}
    server = subprocess.Popen([Path(sys.executable).with_name(command[0]), *command[1:]], env=environment)
    try:
        check = lines["HEALTHCHECK"].replace("CMD python -c ", "").strip('"').replace("8000", str(port))
        deadline = time.monotonic() + 120
        while subprocess.run([sys.executable, "-c", check], capture_output=True).returncode:
            assert server.poll() is None and time.monotonic() < deadline
            time.sleep(1)
    finally:
        server.terminate()
    assert server.wait(30) in (0, 143, -15)
