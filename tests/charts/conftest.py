"""What the tests of the chart share."""

from __future__ import annotations

import pytest

from support.helm import Helm, helm_program


@pytest.fixture(scope="session")
def helm(tmp_path_factory: pytest.TempPathFactory) -> Helm:
    """The real helm, without a cluster."""
    return Helm(helm_program(), tmp_path_factory.mktemp("helm"))
