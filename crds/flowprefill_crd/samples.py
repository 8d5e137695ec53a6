"""Where the sample services lie: beside this package in a checkout, inside it in an installed distribution."""

from __future__ import annotations

from pathlib import Path


def sample_path(name: str) -> Path:
    """The file of the sample `name`, such as "quickstart.yaml". Raises FileNotFoundError, naming what there is."""
    package = Path(__file__).parent
    for folder in (package / "samples", package.parent / "samples"):
        if (folder / name).is_file():
            return folder / name
    known = sorted(path.name for path in (package.parent / "samples").glob("*.yaml"))
    raise FileNotFoundError(f"no sample {name!r}; there are {', '.join(known) or 'none'}")
