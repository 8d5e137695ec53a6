"""Changing a service that runs: live changes, new revisions, other numbers of pods, refused changes."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

from support.local_service import LocalService


def pids(service: LocalService) -> dict[str, int]:
    return {pod.name: pod.containers[0].pid for pod in service.status.pods}


def up(service: LocalService) -> str:
    return service.run("up", "-f", str(service.file), "--timeout", "60").stdout


class Client:
    """Asks the service again and again until stopped; `failures` are requests that got no answer."""

    def __init__(self, service: LocalService) -> None:
        self._service = service
        self._stop = threading.Event()
        self.failures: list[str] = []
        self.seen: set[str] = set()
        self._thread = threading.Thread(target=self._ask)

    def __enter__(self) -> Client:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _ask(self) -> None:
        url = self._service.status.url
        while not self._stop.is_set():
            try:
                self.seen.add(self._service.get(url)["pod"])
            except OSError as error:
                self.failures.append(str(error))


def test_a_live_change_reaches_running_pods(service: LocalService) -> None:
    service.write()
    service.up()
    before = pids(service)
    service.write(scheduling={"policy": "edf"})
    assert "generation 2" in up(service)
    assert pids(service) == before
    live = service.get()["live"]
    assert (live["policy"], live["generation"]) == ("edf", 2)


def test_the_same_file_again_changes_nothing(service: LocalService) -> None:
    service.write()
    service.up()
    before = pids(service)
    assert "runs like that already" in up(service)
    assert pids(service) == before
    assert service.status.generation == 1


def test_a_new_revision_takes_over_without_a_lost_request(service: LocalService) -> None:
    service.write(termination={"preStopSeconds": 1, "lameDuckSeconds": 0, "drainSeconds": 0})
    service.up()
    old = service.status.revision
    with Client(service) as client:
        service.write(
            termination={"preStopSeconds": 1, "lameDuckSeconds": 0, "drainSeconds": 0},
            kvTransfer={"leaseSeconds": 31},
        )
        up(service)
    assert client.failures == []
    assert client.seen == {"demo-proxy-0", "demo-proxy-1"}
    assert service.status.revision != old
    assert {pod.revision for pod in service.status.pods} == {service.status.revision}
    assert service.get()["config"]["kvTransfer"]["leaseSeconds"] == 31
    left = {path.name for path in service.state.config.iterdir()}
    assert left == {f"demo-{service.status.revision}", "demo-live"}


def test_a_revision_that_never_gets_ready_leaves_the_old_one_serving(service: LocalService) -> None:
    service.write()
    service.up()
    before = pids(service)
    service.switch("decode.crash")  # running pods do not look at it
    service.write(kvTransfer={"leaseSeconds": 31})
    done = service.run("up", "-f", str(service.file), "--timeout", "4", check=False)
    assert done.returncode == 1
    assert "not in full use" in done.stderr
    assert before.items() <= pids(service).items()
    assert service.get()["role"] == "proxy"
    service.write()  # back to the last good one
    up(service)
    assert pids(service) == before


def test_with_recreate_the_old_workers_are_gone_before_new_ones_start(service: LocalService) -> None:
    service.write(rollout={"strategy": "Recreate"})
    service.up()
    old = set(pids(service))
    service.switch("prefill.unready")
    service.write(rollout={"strategy": "Recreate"}, kvTransfer={"leaseSeconds": 31})
    service.run("up", "-f", str(service.file), "--timeout", "0", check=False)
    status = service.until(
        lambda s: any(p.role == "prefill" and p.name not in old for p in s.pods), "a new prefill pod"
    )
    workers = [pod for pod in status.pods if pod.role != "proxy"]
    assert all(pod.name not in old for pod in workers)
    assert service.get()["role"] == "proxy", "the proxy has no gap"


def test_another_number_of_pods_restarts_none(service: LocalService) -> None:
    service.write()
    service.up()
    before = pids(service)
    service.write(decode={"replicas": 3})
    up(service)
    assert before.items() <= pids(service).items()
    assert len(service.pods("decode")) == 3
    service.write()
    up(service)
    assert pids(service) == before


def test_two_proxies_take_turns(service: LocalService) -> None:
    service.write(proxy={"replicas": 2})
    service.up()
    assert {service.get()["pod"] for _ in range(4)} == {"demo-proxy-0", "demo-proxy-1"}


def test_a_file_that_is_no_service_is_refused_with_its_field_and_changes_nothing(
    service: LocalService,
) -> None:
    service.write()
    service.up()
    before = pids(service)
    service.file.write_text(service.file.read_text().replace("ttftMilliseconds: 500", "ttftMilliseconds: -1"))
    done = service.run("up", "-f", str(service.file), check=False)
    assert done.returncode == 2
    assert "spec.sloClasses[0].ttftMilliseconds" in done.stderr
    assert "Traceback" not in done.stderr
    assert pids(service) == before


def test_a_missing_secret_is_refused_and_one_that_goes_is_named_until_it_is_back(
    service: LocalService, tmp_path: Path
) -> None:
    files = tmp_path / "files"
    (files / "keys").mkdir(parents=True)
    key = files / "keys" / "k"
    service.write(security={"apiKeysSecretRef": {"name": "keys", "key": "k"}})
    arguments = ("-d", "--port", "0", "--files", str(files))
    done = service.run("up", "-f", str(service.file), *arguments, check=False)
    assert done.returncode == 2
    assert "spec.security.apiKeysSecretRef" in done.stderr
    assert str(key) in done.stderr
    assert service.state.read_status() is None, "nothing was started"
    key.write_text("secret-key\n")
    service.up("--files", str(files))
    keys = Path(service.get()["config"]["apiKeysFile"])
    assert keys.read_text() == "secret-key\n"
    (files / "keys").rename(tmp_path / "away")
    (proxy,) = service.pods("proxy")
    os.kill(proxy.containers[0].pid, signal.SIGKILL)
    service.until(
        lambda s: any(p.phase == "CannotRun" and "'keys'" in p.message for p in s.pods), "the reason"
    )
    (tmp_path / "away").rename(files / "keys")
    service.until(lambda s: s.ready, "ready")


def test_a_paused_service_stays_as_it_is_until_it_is_not_paused(service: LocalService) -> None:
    service.write()
    service.up()
    before = service.status
    changed = {"scheduling": {"policy": "edf"}, "kvTransfer": {"leaseSeconds": 31}, "decode": {"replicas": 2}}
    service.write(paused=True, **changed)
    for _ in range(2):
        assert "demo is paused: nothing was changed" in up(service)
    assert service.status.pods == before.pods
    assert service.status.generation == before.generation
    assert service.get()["live"]["policy"] != "edf"
    assert "paused" in service.run("status").stdout
    service.write(**changed)
    assert "generation 2" in up(service)
    assert not service.status.paused
    assert len(service.pods("decode")) == 2
    assert service.get()["live"]["policy"] == "edf"


def test_a_service_that_does_not_run_yet_cannot_be_paused(service: LocalService) -> None:
    service.write(paused=True)
    done = service.run("up", "-f", str(service.file), "-d", check=False)
    assert done.returncode == 2
    assert "spec.paused: true starts nothing" in done.stderr
    assert service.state.read_status() is None


def test_up_of_a_service_that_stops_waits_for_its_end_and_starts_it_afresh(service: LocalService) -> None:
    service.write()
    service.switch("decode.stubborn")
    service.up()
    old = service.status.pid
    down = service.start("down")
    service.until(lambda s: s.stopping, "the service stops")
    up = service.start("up", "-f", str(service.file), "--detach", "--port", "0", "--timeout", "60")
    assert up.stdout is not None
    assert up.stdout.readline() == "demo is stopping; waiting for its end\n"
    service.run("down", "--now")
    assert up.wait(60) == 0, up.stdout.read()
    down.wait(60)
    assert service.status.ready
    assert service.status.pid != old


def test_up_gives_up_waiting_for_a_stop_when_its_time_is_over(service: LocalService) -> None:
    service.write()
    service.switch("decode.stubborn")
    service.up()
    service.start("down")
    service.until(lambda s: s.stopping, "the service stops")
    done = service.run("up", "-f", str(service.file), "--timeout", "0", check=False)
    assert done.returncode == 1
    assert "still stopping after 0 s" in done.stderr


def test_a_change_ends_when_its_service_is_stopped_meanwhile(service: LocalService) -> None:
    service.write()
    service.up()
    old = service.status.revision
    service.switch("prefill.unready")
    service.write(kvTransfer={"leaseSeconds": 31})
    change = service.start("up", "-f", str(service.file), "--timeout", "600")
    service.until(lambda s: s.revision != old, "the change is taken over")
    service.run("down", "--now")
    assert change.wait(60) == 1
    assert change.stdout is not None
    assert "demo was stopped meanwhile" in change.stdout.read()
