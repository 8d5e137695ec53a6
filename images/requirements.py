"""Print what the project's extras require from others, one requirement a line: `requirements.py EXTRA...`.

Images install this first and the project itself last, so that a change of the code rebuilds one small layer.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path


def requirements(pyproject: Path, extras: list[str]) -> list[str]:
    """The project's requirements with those of `extras`, sorted; an extra may name other extras of the project.

    Raises KeyError for an extra that the project does not have.
    """
    project = tomllib.loads(pyproject.read_text("utf-8"))["project"]
    own = re.compile(rf"{re.escape(project['name'])}\[(?P<extras>[^]]+)\]")
    found, seen = set(project["dependencies"]), set()
    waiting = list(extras)
    while waiting:
        extra = waiting.pop()
        if extra in seen:
            continue
        seen.add(extra)
        for requirement in project["optional-dependencies"][extra]:
            if match := own.fullmatch(requirement):
                waiting += [name.strip() for name in match["extras"].split(",")]
            else:
                found.add(requirement)
    return sorted(found)


if __name__ == "__main__":
    sys.stdout.writelines(
        f"{line}\n" for line in requirements(Path(__file__).with_name("pyproject.toml"), sys.argv[1:])
    )
