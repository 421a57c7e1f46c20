"""A user of the Hub on loopback, in a process of its own."""

import json
import os
import sys
from pathlib import Path

from helpers import processes
from helpers.hub_server import HubServer

WITHOUT_THE_PACKAGE = "import sys\nsys.modules['modeling_tnn'] = None\n"


def environment(hub: HubServer, home: Path) -> dict[str, str]:
    """The environment of a user whose cache is empty."""
    return os.environ | hub.environment | {"HF_HOME": str(home)}


def client(hub: HubServer, home: Path, code: str, *arguments, setup: str = WITHOUT_THE_PACKAGE) -> dict:
    """Run `code` in a fresh process where the package is not installed; what it leaves in the dictionary `results`."""
    script = f"{setup}import json\nresults = {{}}\n{code}\njson.dump(results, open('results.json', 'w'))"
    command = [sys.executable, "-c", script, *map(str, arguments)]
    processes.run(command, check=True, env=environment(hub, home), cwd=home)
    return json.loads((home / "results.json").read_text())
