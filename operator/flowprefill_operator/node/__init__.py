"""The local node: runs planned pods as processes of this machine, as a kubelet runs them as containers.

    objects (plan) ─desired.py▶ groups of pods ─rollout.py▶ start / stop
                                                              │
    supervisor.py owns pods ◀─────────────────────────────────┘
       pod.py        one pod: init containers, containers, readiness, graceful stop
       container.py  one container: start, probes, restart with back-off
       process.py    one process group, through shim.py, which dies with the supervisor
       launch.py     container spec to argv and environment of this machine (pure)
       state.py      the folder that holds a service: files, logs, locks, status
       forward.py    what a Service is here: a port that leads to the ready pods

Import nothing from `flowprefill` here; the pods' files (`endpoints.json`, configuration) are the contract.
"""
