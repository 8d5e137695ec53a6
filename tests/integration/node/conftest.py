from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.local_service import LocalService


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., LocalService]]:
    """Makes services of stand-in pods, by name; whatever a test leaves running is ended and reported."""
    made: list[LocalService] = []

    def service(name: str = "demo") -> LocalService:
        made.append(LocalService(tmp_path, name=name))
        return made[-1]

    yield service
    for one in made:
        one.close()


@pytest.fixture
def service(make: Callable[..., LocalService]) -> LocalService:
    return make()
