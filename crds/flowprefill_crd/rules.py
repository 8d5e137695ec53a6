"""Cross-field rules: declared once, checked here in Python and by the API server in CEL.

A rule holds both halves side by side. `Rules` attaches rules to one field; a model lists its own
in `ApiObject.rules`. The schema generator writes the CEL half into the CRD.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

# Both halves are typed `Any` at this seam: a rule sees one model, list or string of its own choosing.


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One condition on a value of the API, in Python and in CEL, with the words for both."""

    message: str
    """What is wrong and what is accepted. One sentence without a full stop."""

    cel: str
    """The condition in the Common Expression Language; `self` is the value, defaults are filled in."""

    holds: Callable[[Any], bool]
    """The same condition in Python."""

    field: str | None = None
    """The child field (its name in YAML) that the message points at; None points at the value itself."""

    seen: Callable[[Any], str] | None = None
    """The offending value, for the message in Python. CEL has no counterpart: the API server charges a
    number turned into text as if it had no bound."""

    def complaint(self, value: Any) -> str:
        """The message for a value that breaks the rule."""
        return self.message if self.seen is None else f"{self.message}; got {self.seen(value)}"

    def validation(self) -> dict[str, str]:
        """The rule as an item of `x-kubernetes-validations`."""
        item = {"rule": self.cel, "message": self.message}
        if self.field is not None:
            item["fieldPath"] = f".{self.field}"
        return item


def check(rules: tuple[Rule, ...], value: Any) -> None:
    """Raise one error that lists every broken rule.

    The error's type is `rules`; its context holds `problems`, pairs of (child field or None, message).
    """
    problems = [(rule.field, rule.complaint(value)) for rule in rules if not rule.holds(value)]
    if problems:
        raise PydanticCustomError("rules", "{summary}", {"summary": problems[0][1], "problems": problems})


class Rules:
    """Annotation that attaches rules to one field: `Annotated[str, Rules(RULE)]`."""

    def __init__(self, *rules: Rule) -> None:
        self.rules = rules

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        def checked(value: Any) -> Any:
            check(self.rules, value)
            return value

        return core_schema.no_info_after_validator_function(checked, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return with_validations(handler(schema), self.rules)


class Unique:
    """Annotation for a list whose items are unique: by the field `key`, or by value when it is None.

    The API server enforces the same through the list type (`map` or `set`).
    """

    def __init__(self, key: str | None = None) -> None:
        self.key = key

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        def checked(items: Any) -> Any:
            seen: set[Hashable] = set()
            for item in items:
                value = item if self.key is None else getattr(item, self.key)
                if value in seen:
                    what = "" if self.key is None else f"{self.key} "
                    message = f'{what}"{value}" appears twice; each may appear once'
                    raise PydanticCustomError(
                        "rules", "{summary}", {"summary": message, "problems": [(None, message)]}
                    )
                seen.add(value)
            return items

        return core_schema.no_info_after_validator_function(checked, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        node = handler(schema)
        node["x-kubernetes-list-type"] = "set" if self.key is None else "map"
        if self.key is not None:
            node["x-kubernetes-list-map-keys"] = [self.key]
        return node


def with_validations(node: dict[str, Any], rules: tuple[Rule, ...]) -> dict[str, Any]:
    """The JSON schema node with the rules' CEL halves appended."""
    if rules:
        node.setdefault("x-kubernetes-validations", []).extend(rule.validation() for rule in rules)
    return node
