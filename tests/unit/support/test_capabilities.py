"""A missing capability fails where it is promised and skips elsewhere."""

from __future__ import annotations

import pytest

from support.capabilities import require


@pytest.mark.parametrize("promise", ["", "helm", "helm, torch"])
def test_what_is_available_goes_on(monkeypatch: pytest.MonkeyPatch, promise: str) -> None:
    monkeypatch.setenv("FLOWPREFILL_REQUIRE", promise)
    require("helm", True, "not needed")


@pytest.mark.parametrize("promise", ["", "torch", "helmet"])
def test_what_nobody_promised_skips_with_its_reason(monkeypatch: pytest.MonkeyPatch, promise: str) -> None:
    monkeypatch.setenv("FLOWPREFILL_REQUIRE", promise)
    with pytest.raises(pytest.skip.Exception, match="needs helm: no helm on PATH"):
        require("helm", False, "no helm on PATH")


@pytest.mark.parametrize("promise", ["helm", "torch,helm", " torch , helm "])
def test_what_is_promised_fails_with_its_reason(monkeypatch: pytest.MonkeyPatch, promise: str) -> None:
    monkeypatch.setenv("FLOWPREFILL_REQUIRE", promise)
    with pytest.raises(pytest.fail.Exception, match=r"helm is promised .* no helm on PATH"):
        require("helm", False, "no helm on PATH")
