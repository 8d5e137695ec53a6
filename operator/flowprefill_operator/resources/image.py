"""Images of the pods."""

from __future__ import annotations

from flowprefill_operator.labels import Role
from flowprefill_operator.resources.base import Context


def image(context: Context, role: Role) -> str:
    """Image of a role's pods."""
    if role == "proxy":
        return context.settings.proxy_image
    engine = context.service.spec.engine
    return engine.image or context.settings.images[engine.type]
