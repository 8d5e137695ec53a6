"""How pip reaches its indexes on this machine, for a build that cannot see the machine."""

from __future__ import annotations

import ast
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

CARRIED = ("cert", "extra-index-url", "find-links", "index-url", "proxy", "timeout", "trusted-host")
PLACES = ("extra-index-url", "find-links", "index-url")
PIP_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PipSettings:
    """The settings that a build needs too, by their names in pip's configuration file."""

    values: dict[str, str]

    @property
    def local(self) -> list[Path]:
        """Files and folders of this machine that the settings name."""
        places = [value for name in PLACES for value in self.values.get(name, "").split()]
        paths = [Path(urlsplit(place).path) for place in places if urlsplit(place).scheme in ("", "file")]
        # The pages of an index in a folder point to files beside it.
        paths = [path.parent if path.name == "simple" else path for path in paths]
        paths += [Path(self.values["cert"])] if "cert" in self.values else []
        return sorted({path for path in paths if path.exists()})

    @property
    def brings_torch(self) -> bool:
        """Whether the settings choose where torch comes from: a folder with its wheel, or an index of their own."""
        return "index-url" in self.values or any(
            any(path.glob("torch-*.whl")) for path in self.local if path.is_dir()
        )

    def write(self, file: Path) -> Path:
        """Write them as a configuration file."""
        lines = [f"{name} = {' '.join(value.split())}\n" for name, value in sorted(self.values.items())]
        file.write_text("[global]\n" + "".join(lines))
        return file


def pip_settings() -> PipSettings:
    """What `pip config list` says here; variables of the environment go before files."""
    done = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"],
        capture_output=True,
        text=True,
        timeout=PIP_S,
        check=True,
    )
    found: dict[str, str] = {}
    from_environment: dict[str, str] = {}
    for line in done.stdout.splitlines():
        key, _, value = line.partition("=")
        section, _, name = key.rpartition(".")
        name = "timeout" if name == "default-timeout" else name
        if name in CARRIED:
            target = from_environment if section == ":env:" else found
            target[name] = str(ast.literal_eval(value))
    return PipSettings(values=found | from_environment)
