"""A service of stand-in pods on this machine, from `up` to `down`, driven by the command line."""

from __future__ import annotations

import os
import signal
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from flowprefill.wire import EndpointsFile
from flowprefill_operator.node.logs import last_lines
from support.local_service import TIMEOUT_S, LocalService, alive


def endpoints(service: LocalService) -> EndpointsFile:
    return EndpointsFile.model_validate_json(service.state.endpoints.read_bytes())


def log(service: LocalService, role: str) -> str:
    (pod,) = service.pods(role)
    return "\n".join(last_lines(Path(pod.containers[0].log), 100))


def command_of(service: LocalService, role: str) -> psutil.Process:
    """The process of the role's only pod."""
    (pod,) = service.pods(role)
    return psutil.Process(pod.containers[0].pid)


def test_up_serves_on_its_port_and_down_leaves_nothing(service: LocalService) -> None:
    service.write()
    service.up()
    answer = service.get()
    assert answer["role"] == "proxy"
    assert answer["config"]["service"] == "demo"
    assert answer["live"]["sloClasses"][0]["name"] == "chat"
    assert len(service.processes()) >= 7  # a supervisor, three shims, three pods
    url = service.status.url
    service.run("down")
    assert service.processes() == []
    assert service.status.url == ""
    with pytest.raises(urllib.error.URLError):
        service.get(url)
    log = (service.state.logs / "supervisor.log").read_text()
    assert '"SIGTERM"' in log
    assert "service stopped" in log


def test_discovery_sees_each_worker_with_its_revision_and_ports(service: LocalService) -> None:
    service.write(prefill={"replicas": 2})
    service.up()
    found = endpoints(service).endpoints
    assert sorted(e.role for e in found) == ["decode", "prefill", "prefill"]
    assert all(e.ready and not e.terminating for e in found)
    assert {e.revision for e in found} == {service.status.revision}
    for endpoint in found:
        assert service.get(f"http://{endpoint.address}")["pod"] == endpoint.name
        with urllib.request.urlopen(f"http://{endpoint.admin}/ready") as ready:
            assert ready.status == 200


def test_discovery_says_what_the_proxy_reads(service: LocalService) -> None:
    """The two packages share no code, so the file is compared with the proxy's model of it field by field."""
    service.write()
    service.up()
    text = service.state.endpoints.read_text()
    assert EndpointsFile.model_validate_json(text, strict=True, extra="forbid").endpoints


def test_a_pod_that_is_not_ready_is_taken_out_and_comes_back(service: LocalService) -> None:
    service.write()
    service.up()
    service.switch("decode.unready")
    service.until(lambda status: not status.ready, "the service is not ready")
    assert [e.ready for e in endpoints(service).endpoints if e.role == "decode"] == [False]
    assert "decode" in service.status.rollout
    assert service.run("status", check=False).returncode == 1
    service.switch("decode.unready", on=False)
    service.until(lambda status: status.ready, "the service is ready again")
    assert service.pods("decode")[0].restarts == 0


def test_clients_are_not_sent_to_a_proxy_that_is_not_ready(service: LocalService) -> None:
    service.write()
    service.up()
    service.switch("proxy.unready")
    service.until(lambda status: not status.ready, "the proxy is not ready")
    with pytest.raises(OSError):
        service.get()
    service.switch("proxy.unready", on=False)
    service.until(lambda status: status.ready, "the proxy is ready again")
    assert service.get()["role"] == "proxy"


def test_a_killed_pod_is_started_again_with_the_same_name(service: LocalService) -> None:
    service.write()
    service.up()
    name = service.pods("prefill")[0].name
    command_of(service, "prefill").kill()
    service.until(lambda s: s.ready and any(p.restarts == 1 for p in s.pods), "the pod is back")
    assert service.pods("prefill")[0].name == name
    assert "killed by SIGKILL" in log(service, "prefill")


def test_a_pod_whose_shim_is_killed_dies_with_it_and_is_started_again(service: LocalService) -> None:
    service.write()
    service.up()
    command = command_of(service, "prefill")
    command.parent().kill()
    if psutil.LINUX:
        command.wait(TIMEOUT_S)
    service.until(lambda s: s.ready and any(p.restarts == 1 for p in s.pods), "the pod is back")


def test_a_pod_that_fails_its_liveness_probe_is_restarted(service: LocalService) -> None:
    service.write()
    service.up()
    before = command_of(service, "decode")
    service.switch("decode.unhealthy")
    service.until(lambda s: any(p.role == "decode" and p.restarts for p in s.pods), "a restart")
    service.switch("decode.unhealthy", on=False)
    service.until(lambda s: s.ready, "ready again")
    assert not alive(before)
    assert "liveness probe failed" in log(service, "decode")


def test_a_pod_that_crashes_at_once_backs_off_says_why_and_recovers(service: LocalService) -> None:
    service.write()
    service.switch("prefill.crash")
    done = service.run(
        "up", "-f", str(service.file), "--detach", "--port", "0", "--timeout", "3", check=False
    )
    assert done.returncode == 1
    service.until(
        lambda s: any(p.phase == "CrashLoopBackOff" and p.restarts >= 2 for p in s.pods), "back-off"
    )
    screen = service.run("status", check=False).stdout
    assert "CrashLoopBackOff" in screen
    assert "exited with code 3" in screen
    assert service.pods("decode")[0].ready, "other pods are not held up"
    service.switch("prefill.crash", on=False)
    service.until(lambda s: s.ready, "recovery")


def test_a_stubborn_pod_is_killed_with_its_children_at_the_end_of_its_grace(service: LocalService) -> None:
    service.write(kvTransfer={"leaseSeconds": 1, "timeoutSeconds": 1})
    service.switch("decode.stubborn")
    service.switch("decode.child")
    service.up()
    child = psutil.Process(service.get(f"http://{_address(service, 'decode')}")["child"])
    service.run("down", "--timeout", str(TIMEOUT_S))
    assert "got SIGTERM" in "\n".join(last_lines(next(service.state.logs.glob("*decode*.log")), 100))
    assert not alive(child)
    assert service.processes() == []


@pytest.mark.parametrize(
    "kind",
    ["child", pytest.param("daemon", marks=pytest.mark.skipif(not psutil.LINUX, reason="needs Linux"))],
)
def test_what_a_pod_leaves_running_goes_with_it(service: LocalService, kind: str) -> None:
    service.write()
    service.switch(f"decode.{kind}")
    service.up()
    child = psutil.Process(service.get(f"http://{_address(service, 'decode')}")["child"])
    service.run("down")
    assert not alive(child)


def test_a_stopping_pod_is_out_of_discovery_and_still_answers_before_its_signal(
    service: LocalService,
) -> None:
    service.write(termination={"preStopSeconds": 30, "lameDuckSeconds": 0, "drainSeconds": 0})
    service.up()
    address = _address(service, "prefill")
    service.state.signal(signal.SIGTERM)
    service.until(lambda s: s.stopping and all(p.terminating for p in s.pods), "stopping")
    assert all(e.terminating and not e.ready for e in endpoints(service).endpoints)
    assert service.get(f"http://{address}")["role"] == "prefill"
    assert "got SIGTERM" not in log(service, "prefill")
    service.run("down", "--now")
    assert service.processes() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda n: n.name)
def test_ctrl_c_in_the_foreground_leaves_no_process(service: LocalService, number: signal.Signals) -> None:
    service.write()
    process = service.up_in_foreground()
    service.until(lambda s: s.ready, "ready")
    os.killpg(process.pid, number)  # as a terminal does: to the whole foreground group
    out, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, out
    assert "nothing is left running" in out
    assert service.processes() == []
    assert "got SIGTERM" in "\n".join(last_lines(next(service.state.logs.glob("*prefill*.log")), 100))


def test_a_second_ctrl_c_does_not_wait_for_the_grace_period(service: LocalService) -> None:
    service.write(termination={"preStopSeconds": 300, "lameDuckSeconds": 0, "drainSeconds": 0})
    process = service.up_in_foreground()
    service.until(lambda s: s.ready, "ready")
    process.send_signal(signal.SIGINT)
    service.until(lambda s: s.stopping, "stopping")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=TIMEOUT_S)
    assert service.processes() == []


def test_a_killed_supervisor_leaves_no_process_and_the_next_up_works(service: LocalService) -> None:
    service.write()
    service.switch("decode.stubborn")
    service.switch("decode.child")
    service.up()
    old = service.processes()
    os.kill(service.status.pid, signal.SIGKILL)
    service.switch("decode.stubborn", on=False)
    service.up()
    assert not any(alive(process) for process in old)
    assert service.get()["role"] == "proxy"


def test_down_after_a_killed_supervisor_waits_until_nothing_is_left(service: LocalService) -> None:
    service.write()
    service.switch("decode.stubborn")
    service.up()
    os.kill(service.status.pid, signal.SIGKILL)
    service.run("down", "demo")
    assert service.processes() == []
    assert "no service runs" in service.run("status").stdout


def test_two_services_run_side_by_side(make: Callable[..., LocalService]) -> None:
    first, second = make("first"), make("second")
    for service in (first, second):
        service.write()
        service.up()
    assert first.get()["config"]["service"] == "first"
    assert second.get()["config"]["service"] == "second"
    ambiguous = first.run("down", check=False)
    assert ambiguous.returncode == 2
    assert "default/first, default/second" in ambiguous.stderr
    first.run("down", "first")
    assert second.get()["config"]["service"] == "second"
    first.run("down", "--all")
    assert second.processes() == []


def test_a_taken_port_is_an_error_when_asked_for_and_the_next_one_is_used_otherwise(
    make: Callable[..., LocalService],
) -> None:
    first, second = make("first"), make("second")
    first.write()
    first.up()
    port = int(first.status.url.rpartition(":")[2])
    second.write()
    done = second.run("up", "-f", str(second.file), "-d", "--port", str(port), check=False)
    assert done.returncode == 1
    assert f"port {port} of 127.0.0.1 cannot be opened" in done.stderr
    assert "Traceback" not in done.stderr
    second.write(proxy={"portApi": max(port, 1024)})
    second.run("up", "-f", str(second.file), "-d", "--timeout", str(TIMEOUT_S))
    assert int(second.status.url.rpartition(":")[2]) > port


def _address(service: LocalService, role: str) -> str:
    (endpoint,) = [e for e in endpoints(service).endpoints if e.role == role]
    return endpoint.address


def test_logs_show_one_role_and_follow_what_comes(service: LocalService) -> None:
    service.write()
    service.up()
    shown = service.run("logs", "prefill").stdout
    assert shown.splitlines() == [f"prefill starts as {service.pods('prefill')[0].name}"]
    everything = service.run("logs").stdout
    assert all(f"{role} starts as" in everything for role in ("prefill", "decode", "proxy"))
    with service.start("logs", "decode", "--follow", "--tail", "1") as following:
        assert following.stdout is not None
        assert "decode starts as" in following.stdout.readline()
        command_of(service, "decode").kill()
        assert "killed by SIGKILL" in following.stdout.readline()
        assert "decode starts as" in following.stdout.readline()
        following.kill()
