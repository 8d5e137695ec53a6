"""From a service and what is observed of it to what is to be applied and what is to go. Pure.

Surge, in steps that each wait for the one before:
1. The new revision's workers come up beside the old ones, which serve on. The proxies stay as they are.
2. All new workers are ready, with one model: the proxies are replaced. A proxy prefers the workers of its own revision.
3. The last old proxy is gone and one token has gone through the new pair: the old revision goes.

Recreate: the old workers go, then the new ones come, and proxies are replaced meanwhile.
A revision that never gets ready changes nothing beyond step 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from flowprefill_crd import FlowPrefillService
from flowprefill_operator import labels
from flowprefill_operator.fitting import api_port, hand_over, kept, role_of, same_generation, with_replicas
from flowprefill_operator.kinds import CLAIMS, CONFIG_MAPS, DEPLOYMENTS, JOBS, OWNED, RECORDS, kind_of
from flowprefill_operator.observe.observed import Key, Observed
from flowprefill_operator.pinning import commit_maps, is_commit, strays
from flowprefill_operator.plan import plan
from flowprefill_operator.resources.base import Context, Object
from flowprefill_operator.resources.profiling import profile_config_map, profiles_of
from flowprefill_operator.resources.service import url
from flowprefill_operator.revisions import (
    KEPT,
    Revision,
    Target,
    as_recorded,
    choose,
    key_of,
    read_records,
    record,
)
from flowprefill_operator.scene import PROXY, WORKER_ROLES, Scene, scene
from flowprefill_operator.settings import PlanSettings

OF_A_ROLE = ("PodDisruptionBudget", "HorizontalPodAutoscaler", "ScaledObject")
"""Kinds of objects that are about a role's pods."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What the cluster is to look like next.

    `steps` are groups of objects; a group is applied when the one before was. `hand_over` names Deployments whose number
    of pods passes to an autoscaler, with the number they have now. `prune` is what goes. `serving` is the revision that
    the proxies send requests to (None before the first is ready) and `previous` the one that the target replaces.
    `to_prove` says whether the target itself is to be tried with one token now. `waits_for` is why a part of the target is
    not applied yet; `unprofiled` tells that its profile is not there. `deployments` maps names of
    Deployments to roles; `url` is where clients in the cluster reach the API.
    """

    target: Target
    serving: str | None
    previous: str | None
    steps: tuple[tuple[Object, ...], ...]
    hand_over: Mapping[str, int]
    prune: tuple[Observed, ...]
    to_prove: bool
    waits_for: str | None = None
    unprofiled: bool = False
    deployments: Mapping[str, str] = field(default_factory=dict)
    url: str | None = None


def goal(
    service: FlowPrefillService,
    settings: PlanSettings,
    observed: Mapping[Key, Observed],
    proven: frozenset[str],
) -> Goal:
    """The next step. `proven` are the revisions that have served a token."""
    now = scene(observed, service.metadata.uid)
    records = read_records(observed.values(), service.metadata.uid)
    target = choose(service, settings, records, started=lambda rev: rev in proven or now.started(rev))
    previous = _previous(now, target.name, records, proven)
    if target.recorded is not None:
        settings = settings.pinned(target.recorded.images)
    context = Context(service, settings, target.name)
    roles = context.worker_roles

    up = all(now.complete(role, target.name) for role in roles) and not strays(now, target.name)
    proxies_at = _proxy_revision(now)
    recreate = service.spec.rollout.strategy == "Recreate"
    replace_proxies = previous is None or recreate or up or proxies_at in (None, target.name)
    proxy_of = target.recorded if replace_proxies else records.get(previous or "")
    if proxy_of is None:
        replace_proxies = True
    settled = _proxies_settled(now, target.name)
    asleep = any(w.replicas == 0 for role in roles if (w := now.workload(role, target.name)) is not None)
    done = previous is None or (up and settled and (asleep or target.name in proven))
    others = {rev for role, rev in now.deployments if role in WORKER_ROLES}
    others |= {pod.revision for pod in now.alive() if pod.role in WORKER_ROLES}
    in_the_way = recreate and bool(others - {target.name})

    replacing = None if done else previous
    # Clients follow the proxies: what tells them the way changes when the proxies do.
    context = replace(context, proxies_port=None if replace_proxies else api_port(proxy_of))
    planned = plan(
        service,
        settings,
        revision=target.name,
        scaled_revision=replacing,
        proxies_port=context.proxies_port,
    )
    profile, waits_for = _profile(context, now, planned)
    unprofiled = waits_for is not None
    waits_for = "the pods of the revision before to stop" if in_the_way else waits_for
    wanted: list[Object] = []
    for item in planned:
        role = role_of(item)
        is_worker = kind_of(item) == DEPLOYMENTS and role in WORKER_ROLES
        unmeasured = unprofiled and role != "decode" and key_of(item) not in now.objects
        if not (is_worker and (in_the_way or unmeasured)):
            wanted.append(item)
    wanted = [
        as_recorded(item, proxy_of if role_of(item) == PROXY and not replace_proxies else target.recorded)
        for item in wanted
        if not (kind_of(item) == JOBS and profile is not None)
    ]
    if profile is not None:
        wanted.append(profile)
    wanted += commit_maps(service, settings, now, (target.name, replacing))
    wanted = [same_generation(with_replicas(item, service, now, previous), now) for item in wanted]
    wanted.append(record(context, target, planned))
    if replacing is not None:
        wanted += kept(records.get(replacing), now, workers=not recreate)
    keys = {key_of(item) for item in wanted} | {(CONFIG_MAPS, name) for name in profiles_of(wanted)}
    if replacing is not None:
        keys |= _of_other_roles(now, roles)
    return Goal(
        target=target,
        serving=_serving(now, target.name, previous),
        previous=replacing,
        # A Job's pods cannot be changed: one that is there runs to its end as it is.
        steps=_steps(item for item in wanted if not (kind_of(item) == JOBS and key_of(item) in now.objects)),
        hand_over=hand_over(wanted, service, now),
        prune=tuple(_prune(now, keys, records, {target.name, previous})),
        # One ready pod of each role is enough to try, whatever else is still on its way.
        to_prove=now.serves(target.name) and not asleep and target.name not in proven,
        waits_for=waits_for,
        unprofiled=unprofiled,
        url=url(context),
        deployments={key_of(item)[1]: role_of(item) for item in wanted if kind_of(item) == DEPLOYMENTS},
    )


def _previous(now: Scene, target: str, records: Mapping[str, Revision], proven: frozenset[str]) -> str | None:
    """The revision to replace: one that has served a token if any has, even if its pods are just restarting, then one
    that has ready pods, the latest of them. None when there is no other: what never served is in nobody's way, and must
    not hold what the target needs."""
    workers = {rev for (role, rev) in now.deployments if role in WORKER_ROLES}
    others = {rev for rev in workers - {target} if rev in proven or now.serves(rev)}

    def rank(name: str) -> tuple[bool, bool, int, str]:
        number = records[name].number if name in records else 0
        return (name in proven, now.serves(name), number, name)

    return max(others, key=rank, default=None)


def _proxy_revision(now: Scene) -> str | None:
    """The revision that the proxies' Deployment was last applied for."""
    return next((rev for (role, rev) in now.deployments if role == PROXY), None)


def _proxies_settled(now: Scene, target: str) -> bool:
    """Whether all proxies are of the target, with none of another revision left, not even one that stops."""
    left = any(pod.role == PROXY and pod.revision != target for pod in now.alive())
    return not left and now.complete(PROXY, target)


def _serving(now: Scene, target: str, previous: str | None) -> str | None:
    """The revision that requests go to: a proxy prefers its own, and the old one's stay until the new one's are ready."""
    new_proxies = any(pod.role == PROXY and pod.revision == target and pod.ready for _, pod in now.pods)
    if now.serves(target) and (new_proxies or previous is None or not now.serves(previous)):
        return target
    if previous is not None and now.serves(previous):
        return previous
    return None


def _profile(context: Context, now: Scene, planned: Iterable[Object]) -> tuple[Object | None, str | None]:
    """The ConfigMap of the profiling Job, once there is one, and else what its readers wait for."""
    job = next((item for item in planned if kind_of(item) == JOBS), None)
    if job is None:
        return None, None
    name = key_of(job)[1]
    kept = now.objects.get((CONFIG_MAPS, name))
    if kept is not None and kept.data:
        return profile_config_map(context, next(iter(kept.data.values()))), None
    for item, pod in now.pods:
        if pod.role != "profiler" or not item.name.startswith(f"{name}-"):
            continue
        for container in pod.containers:
            if not container.init and container.exit_code == 0 and container.ended and container.ended[1]:
                return profile_config_map(context, container.ended[1]), None
    return None, "the profiling Job"


def _of_other_roles(now: Scene, roles: Iterable[str]) -> set[Key]:
    """Budgets and autoscalers of roles that only the revision before has: a change of the mode."""
    others = set(WORKER_ROLES) - set(roles)
    return {
        key
        for key, item in now.objects.items()
        if key[0].kind in OF_A_ROLE and item.labels.get(labels.ROLE) in others
    }


def _steps(wanted: Iterable[Object]) -> tuple[tuple[Object, ...], ...]:
    """Records first, so that nothing runs that is not recorded; everything after what it refers to."""
    first: list[Object] = []
    middle: list[Object] = []
    last: list[Object] = []
    before = {RECORDS.kind, "Role"}  # a RoleBinding is refused while its Role is not there
    after = {DEPLOYMENTS.kind, JOBS.kind, *OF_A_ROLE}
    for item in wanted:
        kind = kind_of(item)
        (first if kind.kind in before else last if kind.kind in after else middle).append(item)
    return (tuple(first), tuple(middle), tuple(last))


def _prune(
    now: Scene, wanted: set[Key], records: Mapping[str, Revision], in_use: set[str | None]
) -> Iterable[Observed]:
    """Own objects that are not wanted, but for the latest records, and what their models' revisions stood for. A claim
    without owner is the user's to delete."""
    spare = sorted(
        (r for r in records.values() if r.name not in in_use), key=lambda r: r.number, reverse=True
    )[:KEPT]
    kept = {r.name for r in spare} | in_use
    for key, item in now.objects.items():
        if key in wanted or key[0] not in OWNED or item.terminating:
            continue
        if (key[0] == RECORDS or is_commit(item)) and item.labels.get(labels.REVISION) in kept:
            continue
        if key[0] == CLAIMS and len(in_use - {None}) > 1:
            continue  # pods of the revision before may start from it
        yield item
