"""Every engine there is, one after the other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from flowprefill.engines.protocol import Engine
from support.engine_cases import CASES, EngineCase


@pytest.fixture(scope="module", params=[pytest.param(case, id=case.name, marks=case.marks) for case in CASES])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    case: EngineCase = request.param
    engine = case.build()
    with engine.thread_context():
        yield engine
    engine.close()
