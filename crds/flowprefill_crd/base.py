"""The base of every object in the API, and the small types that many of them share."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    StringConstraints,
    WithJsonSchema,
    model_validator,
)
from pydantic.alias_generators import to_camel
from pydantic_core import CoreSchema

from flowprefill_crd.rules import Rule, check, with_validations

QUANTITY_PATTERN = r"^(\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))(([KMGTPE]i)|[numkMGTPE]|([eE](\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))))?$"
DNS_LABEL_PATTERN = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
DNS_SUBDOMAIN_PATTERN = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"

LABEL_VALUE_PATTERN = r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$"
IMAGE_PATTERN = r"^[!-~]+$"
HOSTNAME_PATTERN = rf"^([*]\.)?{DNS_SUBDOMAIN_PATTERN.removeprefix('^')}"


class ApiObject(BaseModel):
    """An object of the API: frozen, strictly typed, and without room for unknown fields.

    Python names are snake_case, YAML names camelCase. A field's docstring is what `kubectl explain`
    shows. The docstring of every leaf ends with what a change does: "Restarts pods." when it starts a
    new revision, "Applied live." when running pods stay.
    """

    model_config = ConfigDict(
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        frozen=True,
        extra="forbid",
        strict=True,
        use_attribute_docstrings=True,
    )

    rules: ClassVar[tuple[Rule, ...]] = ()

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        check(self.rules, self)
        return self

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        node = handler.resolve_ref_schema(handler(schema))
        return with_validations(node, cls.rules)


def _quantity_text(value: object) -> object:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


Quantity = Annotated[
    str,
    StringConstraints(pattern=QUANTITY_PATTERN, max_length=32),
    BeforeValidator(_quantity_text),
    WithJsonSchema(
        {
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "x-kubernetes-int-or-string": True,
            "pattern": QUANTITY_PATTERN,
            "maxLength": 32,
        }
    ),
]
"""An amount as Kubernetes writes it: 2, "500m", "16Gi"."""

DnsLabel = Annotated[str, StringConstraints(pattern=DNS_LABEL_PATTERN, min_length=1, max_length=63)]
"""A name of at most 63 lower-case letters, digits and dashes."""

DnsSubdomain = Annotated[str, StringConstraints(pattern=DNS_SUBDOMAIN_PATTERN, min_length=1, max_length=253)]
"""A name of at most 253 lower-case letters, digits, dashes and dots."""

ImageName = Annotated[str, StringConstraints(pattern=IMAGE_PATTERN, min_length=1, max_length=512)]
"""A container image as a container runtime takes it."""

SecretKey = Annotated[str, StringConstraints(pattern=r"^[-._a-zA-Z0-9]+$", min_length=1, max_length=253)]
"""A key of a Secret or ConfigMap."""


LabelKey = Annotated[str, StringConstraints(min_length=1, max_length=317)]
"""A key of a label or annotation: a name of at most 63 characters, behind a DNS name and a slash or not."""

LabelValue = Annotated[str, StringConstraints(pattern=LABEL_VALUE_PATTERN, max_length=63)]
"""A value of a label."""


class SecretKeyRef(ApiObject):
    """One key of a Secret in the service's namespace."""

    name: DnsSubdomain
    """Name of the Secret. Restarts pods."""

    key: SecretKey
    """Key within the Secret. Restarts pods."""


class ObjectRef(ApiObject):
    """The name of an object in the service's namespace."""

    name: DnsSubdomain = Field()
    """Name of the object. Restarts pods."""
