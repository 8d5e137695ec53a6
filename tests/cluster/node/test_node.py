"""The node itself: what the other tests of this folder stand on."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

import pytest

from support.control_plane.images import Image
from support.control_plane.images_pack import pack
from support.control_plane.node import Node
from support.control_plane.node_assets import node_assets
from support.control_plane.node_leftovers import SYSCTLS
from support.control_plane.node_pods import PORT, pod_spec, restricted_namespace, web_server
from support.control_plane.waiting import until

FETCH = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=10).status)"


def test_restricted_pods_roll_out_and_answer_under_their_services_name(
    node: Node, proxy_image: Image
) -> None:
    with restricted_namespace(node) as namespace:
        objects = json.dumps(web_server("web", proxy_image.reference, replicas=2))
        node.plane.kubectl("apply", "--namespace", namespace, "-f", "-", stdin=objects)
        node.plane.kubectl("rollout", "status", "deployment/web", "--namespace", namespace, "--timeout=100s")
        url = f"http://web.{namespace}.svc.cluster.local:{PORT}/"
        # Pods are ready a moment before kube-proxy knows it.
        until(lambda: node.run("python3", "-c", FETCH, url, check=False) == "200\n", f"an answer from {url}")
        # A pod asks for the short name, and is answered through the Service by a pod beside it.
        from_pod = ["exec", "deployment/web", "--namespace", namespace, "--", "python3", "-c", FETCH]
        assert node.plane.kubectl(*from_pod, f"http://web:{PORT}/").stdout == "200\n"
        # The API server reaches the kubelet for logs.
        logs = node.plane.kubectl("logs", "deployment/web", "--namespace", namespace, "--tail=-1").stdout
        assert "GET / HTTP/1.1" in logs


def test_a_pod_that_may_become_root_is_refused(node: Node) -> None:
    with restricted_namespace(node) as namespace:
        spec = {"containers": [{"name": "main", "image": "any", "securityContext": {"privileged": True}}]}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "root"}, "spec": spec}
        done = node.plane.kubectl(
            "apply", "--namespace", namespace, "-f", "-", stdin=json.dumps(pod), check=False
        )
        assert done.returncode != 0
        assert 'violates PodSecurity "restricted:latest"' in done.stderr


def test_a_stopped_node_leaves_nothing_behind(tmp_path: Path) -> None:
    programs = node_assets()
    settings = {name: Path("/proc/sys", *name.split(".")).read_text() for name in SYSCTLS}
    before = _traces()
    node = Node(programs, tmp_path / "n")
    node.start()
    try:
        archive = pack(
            "localhost/pause:test", {"pause": programs / "pause"}, ["/pause"], tmp_path / "pause.tar"
        )
        node.load_image(archive)
        spec = pod_spec("localhost/pause:test", ["/pause"]) | {"securityContext": {"runAsUser": 10001}}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "stays"}, "spec": spec}
        node.plane.kubectl("apply", "-f", "-", stdin=json.dumps(pod))
        node.plane.kubectl("wait", "--for=condition=Ready", "pod/stays", "--timeout=60s")
        assert _traces() - before, "a running node is not seen at all"
    finally:
        node.stop()
    # Pods of a node that other tests share may have ended meanwhile, so less than before is fine.
    assert not _traces() - before
    assert {name: Path("/proc/sys", *name.split(".")).read_text() for name in SYSCTLS} == settings
    assert not _processes_that_name(str(tmp_path))


def _traces() -> set[str]:
    """Mounts, network namespaces, interfaces and control groups of nodes."""
    mounts = {line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()}
    places = (
        "/run/netns",
        "/sys/class/net",
        "/var/log/containers",
        "/var/lib/cni/results",
        "/run/flowprefill-test-nodes",
    )
    names = {str(path) for place in places for path in Path(place).glob("*")}
    groups = {str(path) for path in Path("/sys/fs/cgroup").glob("*/fpnode-*/**")}
    return mounts | names | groups


def _processes_that_name(text: str) -> list[str]:
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            command = (directory / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if text in command:
            found.append(command)
    return found


@pytest.mark.parametrize("name", ["operator", "proxy", "serving"])
def test_an_image_runs_as_user_10001_on_a_read_only_root(
    name: str, node: Node, request: pytest.FixtureRequest
) -> None:
    image: Image = request.getfixturevalue(f"{name}_image")
    with restricted_namespace(node) as namespace:
        # No command: the image's own entry point, as `flowprefill version`.
        spec = pod_spec(image.reference, []) | {"restartPolicy": "Never"}
        containers = spec["containers"]
        assert isinstance(containers, list)
        del containers[0]["command"]
        containers[0]["args"] = ["version", "--verbose"]
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}
        node.plane.kubectl("apply", "--namespace", namespace, "-f", "-", stdin=json.dumps(pod))
        phase = "--for=jsonpath={.status.phase}=Succeeded"
        node.plane.kubectl("wait", phase, f"pod/{name}", "--namespace", namespace, "--timeout=100s")
        said = node.plane.kubectl("logs", name, "--namespace", namespace).stdout.splitlines()
        assert said[0] == version("flowprefill")
        assert any(line.startswith("torch ") for line in said)
