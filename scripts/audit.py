"""Ask for known vulnerabilities of all that is installed here, with pip-audit.

Without an answer, as behind a mirror or without a network, pip-audit says that none are known. Such packages count as
not audited here, and --strict fails for them. Other options go to pip-audit, see `pip-audit --help`.

Example:
    python scripts/audit.py
    python scripts/audit.py --strict --vulnerability-service osv
"""

import argparse
import json
import subprocess
import sys

from errors import report_errors

WHOLE_ENVIRONMENT = ["--local", "--skip-editable"]


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strict", action="store_true", help="fail if a package could not be audited")
    parser.add_argument("--requirement", help="file of pinned packages to audit instead of the environment")
    return parser.parse_known_args()


def ask(args: argparse.Namespace, options: list[str]) -> tuple[list[dict], str]:
    """The packages with what pip-audit found out about each, none without an answer, and why there is none."""
    what = WHOLE_ENVIRONMENT
    if args.requirement is not None:
        what = ["--requirement", args.requirement, "--no-deps", "--disable-pip"]
    command = [sys.executable, "-m", "pip_audit", "--format", "json", "--progress-spinner", "off", *what, *options]
    run = subprocess.run(command, capture_output=True, text=True)
    try:
        return json.loads(run.stdout)["dependencies"], ""
    except ValueError:
        return [], (run.stderr.strip() or "no output").splitlines()[-1]


def report(packages: list[dict], problem: str) -> tuple[str, int, int]:
    """What to say, and how many packages have vulnerabilities and were not audited."""
    lines = [
        f"{package['name']} {package['version']}: {found['id']}, fixed in {', '.join(found['fix_versions']) or 'none'}"
        for package in packages
        for found in package.get("vulns", [])
    ]
    vulnerable = sum(bool(package.get("vulns")) for package in packages)
    skipped = [package["name"] for package in packages if "skip_reason" in package]
    if not packages:
        return f"Nothing was audited: {problem}", 0, 1
    if skipped:
        lines.append(f"Not audited, the service knows nothing about them: {', '.join(skipped)}")
    audited = len(packages) - len(skipped)
    lines.append(f"{vulnerable} of {audited} audited packages have known vulnerabilities; {len(skipped)} not audited.")
    return "\n".join(lines), vulnerable, len(skipped)


@report_errors
def main():
    args, options = parse_arguments()
    text, vulnerable, skipped = report(*ask(args, options))
    sys.stdout.write(text + "\n")
    sys.exit(1 if vulnerable else 2 if args.strict and skipped else 0)


if __name__ == "__main__":
    main()
