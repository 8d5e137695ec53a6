"""What is raised for text that does not become a value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing wrong in a document."""

    source: str
    """Where the document comes from: a file, with the document's number when it holds several; or ""."""

    path: str
    """Path of the field, such as `spec.sloClasses[1].name`; "" for the document as a whole."""

    message: str
    """What was wrong, the value seen and what is accepted."""

    def __str__(self) -> str:
        return ": ".join(part for part in (self.source, self.path, self.message) if part)


class InvalidDocument(ValueError):
    """A document that does not become a value; the message lists every problem, one a line."""

    kind = "document"

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__(f"invalid {self.kind}:\n" + "\n".join(f"  {problem}" for problem in self.problems))


class InvalidService(InvalidDocument):
    """Text that is no valid FlowPrefillService."""

    kind = "FlowPrefillService"


class InvalidConfig(InvalidDocument):
    """Text that is no valid pod or live configuration."""

    kind = "configuration"
