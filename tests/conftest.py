"""Rules for every suite: where CI promises a capability, a skip is a failure."""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest
from hypothesis import settings

# How long an example takes says something of the machine, not of the code.
settings.register_profile("flowprefill", deadline=None)
settings.load_profile("flowprefill")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn a skip into a failure when FLOWPREFILL_NO_SKIP is set, so that no missing piece reads as a pass."""
    report = yield
    if report.skipped and os.environ.get("FLOWPREFILL_NO_SKIP"):
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} was skipped, and nothing may skip here: {report.longrepr}"
    return report
