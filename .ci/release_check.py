"""Check a release: everything but the upload. `make release-check` builds the archives, and calls this.

Two fresh environments, of the newest releases and of the oldest allowed ones, get the source archive and then the
wheel. In each the commands and the Python of the README run, with few steps. The dependencies of the newest one are
checked for licences and known vulnerabilities, and listed in an SBOM. Nothing is skipped unless `--skip` names it.

Example:
    python .ci/release_check.py --tag v0.1.0
    python .ci/release_check.py --skip hub links audit
"""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "release"
PINS = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / ".ci" / "constraints.txt").read_text(), re.MULTILINE))
PIP = ["-m", "pip", "--disable-pip-version-check", "--quiet"]
# Commands of the README: with these options they take seconds. A page is served until it is stopped.
FEW = {"demo": "--max_steps 20", "generate": "--max_new_tokens 20", "serve": "--help", "pretrain": "--max_steps 20",
       "evaluate": "--lengths 256", "finetune-glue": "--max_steps 20"}  # fmt: skip
FROM_THE_HUB = ("pretrain", "evaluate", "finetune-glue")
LICENCES = "Apache;BSD;MIT;ISC;MPL;Mozilla;PSF;Python Software Foundation"


def run(*command, cwd: Path = ROOT, **settings) -> str:
    """Run a command that must succeed; its standard output."""
    words = [str(word) for word in command]
    settings |= {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(words, cwd=cwd, text=True, **settings)  # noqa: S603
    if done.returncode:
        raise RuntimeError(f"{shlex.join(words)}\n{done.stdout[-3000:]}")
    return done.stdout


def tool(package: str, *command):
    """Run a tool in an environment of its own, with the version of .ci/constraints.txt."""
    pipx = [Path(sys.executable).with_name("pipx"), "run", "--spec", f"{package}=={PINS[package]}"]
    return run(*pipx, *command, env=os.environ | {"PIPX_HOME": str(WORK / "pipx")})


def check_version(tag: str | None):
    """One version everywhere, which is that of the tag; a tagged one has a date."""
    files = {"modeling_tnn/__init__.py": r'^__version__ = "(.+)"', "CITATION.cff": r"^version: (.+)", "CHANGELOG.md":
             r"^## (\S+) - \d" if tag else r"^## (\S+) "}  # fmt: skip
    found = {name: re.search(line, (ROOT / name).read_text(), re.MULTILINE) for name, line in files.items()}
    versions = {name: match and match[1] for name, match in found.items()} | ({"tag": tag[1:]} if tag else {})
    versions |= {path.name: re.split("-|.tar", path.name)[1] for path in archives()}
    if len(set(versions.values())) != 1:
        raise RuntimeError(f"the versions must be one, got {versions}")


def check_files():
    """The citation and the workflows are valid."""
    tool("cffconvert", "cffconvert", "--validate")
    tool("check-jsonschema", "check-jsonschema", "--builtin-schema", "vendor.github-workflows",
         *(ROOT / ".github" / "workflows").glob("*.yml"))  # fmt: skip
    tool("zizmor", "zizmor", "--offline", "--quiet", ".github/workflows")


def archives() -> list[Path]:
    """The source archive and the wheel."""
    return sorted((ROOT / "dist").glob("modeling_tnn-*"), key=lambda path: path.suffix == ".whl")


def python_of(name: str) -> Path:
    return WORK / name / "bin" / "python"


def check_installation(name: str, constraints: list[str], pip_args: list[str]):
    """Both archives install the same files, with dependencies that agree."""
    python, installed = python_of(name), []
    run(sys.executable, "-m", "venv", "--clear", WORK / name)
    for archive, options in zip(archives(), ([], ["--force-reinstall", "--no-deps"]), strict=True):
        run(python, *PIP, "install", *constraints, *pip_args, *options, f"{archive}[training]")
        (record,) = (WORK / name).glob("lib/*/site-packages/modeling_tnn-*.dist-info/RECORD")
        installed.append({line for line in record.read_text().splitlines() if ".dist-info/" not in line})
    if different := installed[0] ^ installed[1]:
        raise RuntimeError(f"the archives must install the same files, got {different}")
    run(python, *PIP, "check")


def check_readme(name: str, hub: bool):
    """The commands of the README and its Python, in an empty folder."""
    folder = WORK / f"{name}-readme"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    env = os.environ | {"PATH": f"{python_of(name).parent}:{os.environ['PATH']}", "HF_HOME": str(folder / "hub")}
    env |= {} if hub else {"HF_HUB_OFFLINE": "1"}
    shell = "\n".join(re.findall(r"```bash\n(.*?)```", text, re.DOTALL)).replace("\\\n", " ").splitlines()
    for words in (shlex.split(line, comments=True) for line in shell):
        if words[:1] == ["tnn"] and (hub or words[1] not in FROM_THE_HUB):
            run(*words, *FEW.get(words[1], "").split(), cwd=folder, env=env)
    run(python_of(name), "-c", "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL)), cwd=folder, env=env)


def dependencies() -> str:
    """Return the packages of the newest environment as requirements, with the versions that PyPI knows."""
    frozen = run(python_of("newest"), *PIP, "freeze", "--exclude", "modeling-tnn", cwd=WORK)
    return re.sub(r"\+\w+$", "", frozen, flags=re.MULTILINE)


def check_licences():
    """Those of all dependencies are permissive, or those of Mozilla; torch for CUDA brings libraries with NVIDIA's."""
    nvidia = re.findall(r"^((?:nvidia|cuda)-[\w-]+)", dependencies(), re.MULTILINE)
    tool("pip-licenses", "pip-licenses", f"--python={python_of('newest')}", "--from=mixed", "--partial-match",
         f"--allow-only={LICENCES}", *(["--ignore-packages", *nvidia] if nvidia else []))  # fmt: skip


def write_sbom():
    tool("cyclonedx-bom", "cyclonedx-py", "environment", python_of("newest"), "--of", "JSON", "-o", WORK / "sbom.json")


def check_vulnerabilities():
    """No known ones in the dependencies."""
    requirements = WORK / "requirements.txt"
    requirements.write_text(dependencies())
    tool("pip-audit", "pip-audit", "--strict", "--no-deps", "--disable-pip", "-r", requirements)


def check_links():
    """Links of the pages, and of the README as PyPI shows it; those inside are a test (tests/repo/test_docs.py)."""
    published = ROOT / "build" / "export" / "README.md"
    pages = [
        published,
        *(path for folder in ("docs", "model_cards", "configuration") for path in (ROOT / folder).rglob("*.md")),
    ]
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    links = sorted(set(re.findall(r"\]\((https://[^)\s]+)\)", text)))

    def fault(link: str) -> str:
        try:
            request = urllib.request.Request(link, headers={"User-Agent": "modeling-tnn"})  # noqa: S310
            urllib.request.urlopen(request, timeout=30).close()  # noqa: S310
        except OSError as error:
            return f"{link}: {error}"

    with ThreadPoolExecutor(8) as pool:
        if faults := [*filter(None, pool.map(fault, links))]:
            raise RuntimeError("\n".join(faults))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tag", help="Name of the tag: v and the version.")
    parser.add_argument("--skip", nargs="+", default=[], metavar="CHECK", help="Checks to leave out. hub: the "
                        "commands of the README that download from the Hub.")  # fmt: skip
    args = parser.parse_args()
    pip_args = shlex.split(os.environ.get("PIP_ARGS", ""))
    checks = {"version": partial(check_version, args.tag), "files": check_files}
    for name, constraints in {"newest": [], "oldest": ["-c", ROOT / ".ci" / "oldest.txt"]}.items():
        checks[name] = partial(check_installation, name, constraints, pip_args)
        checks[f"readme-{name}"] = partial(check_readme, name, "hub" not in args.skip)
    checks |= {"licences": check_licences, "sbom": write_sbom, "audit": check_vulnerabilities, "links": check_links}
    if unknown := set(args.skip) - {"hub", *checks}:
        parser.error(f"--skip must be of hub, {', '.join(checks)}, got {', '.join(unknown)}")
    failed = []
    for name, check in checks.items():
        start, result = time.monotonic(), "skipped" if name in args.skip else "passed"
        try:
            None if name in args.skip else check()
        except RuntimeError as error:
            failed.append(name)
            result = f"FAILED: {error}"
        print(f"{name:<16} {time.monotonic() - start:5.0f} s  {result}", flush=True)
    if "hub" in args.skip:
        print(f"{'hub':<16}          skipped: the commands {', '.join(FROM_THE_HUB)} of the README")
    sys.exit(f"failed: {', '.join(failed)}" if failed else None)


if __name__ == "__main__":
    main()
