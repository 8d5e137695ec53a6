"""`flowprefill render`: the objects that the operator would create."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flowprefill.cli.problems import guarded
from flowprefill.cli.services import read_services

if TYPE_CHECKING:
    from yaml import SafeDumper, ScalarNode


def render(
    file: Annotated[
        Path,
        typer.Option(
            "--file", "-f", help="YAML file with one or more FlowPrefillServices; - is standard input."
        ),
    ],
    kind: Annotated[
        list[str] | None, typer.Option("--kind", "-k", help="Only objects of this kind; may be repeated.")
    ] = None,
) -> None:
    """Print the Kubernetes objects that the operator would create, as YAML. Needs no cluster.

    Example: flowprefill render -f quickstart.yaml --kind Deployment
    """
    with guarded():
        import yaml

        from flowprefill_operator.plan import Object, plan
        from flowprefill_operator.settings import PlanSettings
        from flowprefill_operator.unsupported import lost_container, unsupported

        kinds = {name.lower() for name in kind or ()}
        settings = PlanSettings()
        objects: list[Object] = []
        for service in read_services(file):
            planned = plan(service, settings)
            refused = unsupported(service) or lost_container(planned)
            if refused is not None:
                name, (_, why) = service.metadata.name, refused
                print(f"flowprefill: {name}: the operator does not act on this: {why}", file=sys.stderr)
            objects += planned
        chosen = [item for item in objects if not kinds or str(item["kind"]).lower() in kinds]
        print(yaml.dump_all(chosen, Dumper=_dumper(), sort_keys=False, width=110), end="")


def _dumper() -> type[SafeDumper]:
    """YAML with the documents inside ConfigMaps as blocks, so that they can be read."""
    import yaml

    class Dumper(yaml.SafeDumper):
        pass

    def text(dumper: SafeDumper, value: str) -> ScalarNode:
        style = "|" if "\n" in value else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    Dumper.add_representer(str, text)
    return Dumper
