"""One real node for the folder, with the images that the Dockerfiles of this checkout build."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.capabilities import promised
from support.control_plane import ecosystem_prometheus
from support.control_plane.images import Image, image
from support.control_plane.node import Node
from support.control_plane.node_assets import node_assets
from support.control_plane.node_release import NodeRelease, release

BUILD_TIMEOUT_S = 2400
"""For whichever test builds the images that the others use."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.timeout(BUILD_TIMEOUT_S))
    # A Prometheus stays once it is there; what is measured without it comes first.
    items.sort(key=lambda item: "prometheus" in getattr(item, "fixturenames", ()))


@pytest.fixture(scope="session")
def node() -> Iterator[Node]:
    """A node without images. Its folder is none of pytest's, which other runs of pytest may clean up."""
    with tempfile.TemporaryDirectory(prefix="fpnode-", dir="/var/tmp", ignore_cleanup_errors=True) as folder:
        node = Node(node_assets(), Path(folder) / "n")
        node.start()
        yield node
        node.stop()


@pytest.fixture(scope="session")
def operator_image(node: Node) -> Image:
    """The operator's image, on the node."""
    return _loaded(node, image("operator"))


@pytest.fixture(scope="session")
def serving_image(node: Node) -> Image:
    """The image of prefill and decode pods, on the node."""
    return _loaded(node, image("serving"))


@pytest.fixture(scope="session")
def proxy_image(node: Node) -> Image:
    """The proxy's image, on the node."""
    return _loaded(node, image("proxy"))


@pytest.fixture(scope="session")
def built_vllm_image() -> Image:
    """The image with vLLM for CPUs: 1.5 GB to download and minutes to build, so that it is built where it is promised."""
    if "vllm-image" not in promised():
        pytest.skip("builds for minutes: promise vllm-image in FLOWPREFILL_REQUIRE")
    return image("serving-vllm-cpu")


@pytest.fixture(scope="session")
def vllm_image(node: Node, built_vllm_image: Image) -> Image:
    """The image with vLLM for CPUs, on the node."""
    return _loaded(node, built_vllm_image)


def _loaded(node: Node, built: Image) -> Image:
    node.load_image(built.archive)
    return built


@pytest.fixture(scope="session")
def operator_release(
    node: Node,
    operator_image: Image,
    serving_image: Image,
    proxy_image: Image,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[NodeRelease]:
    """The chart, installed with the images of this checkout."""
    with release(node, tmp_path_factory.mktemp("helm")) as installed:
        yield installed


@pytest.fixture(scope="session")
def prometheus(
    operator_release: NodeRelease, tmp_path_factory: pytest.TempPathFactory
) -> ecosystem_prometheus.Prometheus:
    """A Prometheus of the cluster, installed after the operator."""
    return ecosystem_prometheus.install_prometheus(
        operator_release.node, tmp_path_factory.mktemp("prometheus")
    )
