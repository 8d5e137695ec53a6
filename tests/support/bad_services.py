"""Specs that break one rule each, with the message that the rule gives.

The same table is meant for both halves of a rule: parsing in Python, and CEL in an API server.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from support.services import MINIMAL_SPEC, merged


@dataclass(frozen=True, slots=True, kw_only=True)
class BadService:
    """A spec that one rule forbids."""

    name: str
    changes: dict[str, Any]
    """What differs from the smallest valid spec."""

    path: str
    """Where the message points."""

    message: str
    """How the message starts."""

    @property
    def spec(self) -> dict[str, Any]:
        """The whole spec."""
        spec: dict[str, Any] = merged(MINIMAL_SPEC, self.changes)
        return spec

    def __str__(self) -> str:
        return self.name


_HF = "hf://org/name"
_CHAT = {"name": "chat", "ttftMilliseconds": 1000}
_DOCUMENT = {"name": "document", "ttftMilliseconds": 8000}

BAD_SERVICES = (
    BadService(
        name="uri-scheme",
        changes={"model": {"uri": "https://example.com/model"}},
        path="spec.model.uri",
        message="use embedded://NAME, hf://ORG/NAME",
    ),
    BadService(
        name="uri-of-one-part",
        changes={"model": {"uri": "hf://name"}},
        path="spec.model.uri",
        message="use embedded://NAME, hf://ORG/NAME",
    ),
    BadService(
        name="revision-of-an-embedded-model",
        changes={"model": {"revision": "main"}},
        path="spec.model.revision",
        message="revision applies to hf:// models only",
    ),
    BadService(
        name="revision-twice",
        changes={"model": {"uri": f"{_HF}@main", "revision": "main"}},
        path="spec.model.revision",
        message="the revision is given twice",
    ),
    BadService(
        name="secret-of-an-embedded-model",
        changes={"model": {"secretRef": {"name": "hub", "key": "token"}}},
        path="spec.model.secretRef",
        message="secretRef applies to hf:// models only",
    ),
    BadService(
        name="cache-of-an-embedded-model",
        changes={"model": {"cache": {"emptyDir": {}}}},
        path="spec.model.cache",
        message="cache applies to hf:// models only",
    ),
    BadService(
        name="two-caches",
        changes={"model": {"uri": _HF, "cache": {"emptyDir": {}, "claim": {"name": "models"}}}},
        path="spec.model.cache",
        message="set exactly one of claim, persistentVolumeClaim and emptyDir",
    ),
    BadService(
        name="empty-cache",
        changes={"model": {"uri": _HF, "cache": {}}},
        path="spec.model.cache",
        message="set exactly one of claim, persistentVolumeClaim and emptyDir",
    ),
    BadService(
        name="objective-of-100",
        changes={"sloClasses": [{**_CHAT, "objective": "100"}]},
        path="spec.sloClasses[0].objective",
        message='use a percent from "50" to "99.999"',
    ),
    BadService(
        name="objective-as-a-ratio",
        changes={"sloClasses": [{**_CHAT, "objective": "0.99"}]},
        path="spec.sloClasses[0].objective",
        message='use a percent from "50" to "99.999"',
    ),
    BadService(
        name="least-target-above-the-target",
        changes={"sloClasses": [{**_CHAT, "minTtftMilliseconds": 1001}]},
        path="spec.sloClasses[0].minTtftMilliseconds",
        message="minTtftMilliseconds is above ttftMilliseconds",
    ),
    BadService(
        name="largest-target-below-the-target",
        changes={"sloClasses": [{**_CHAT, "maxTtftMilliseconds": 999}]},
        path="spec.sloClasses[0].maxTtftMilliseconds",
        message="maxTtftMilliseconds is below ttftMilliseconds",
    ),
    BadService(
        name="no-default-class",
        changes={"sloClasses": [_CHAT, _DOCUMENT]},
        path="spec.sloClasses",
        message="exactly one class must say default: true",
    ),
    BadService(
        name="two-default-classes",
        changes={"sloClasses": [{**_CHAT, "default": True}, {**_DOCUMENT, "default": True}]},
        path="spec.sloClasses",
        message="exactly one class must say default: true",
    ),
    BadService(
        name="service-tier-in-two-classes",
        changes={
            "sloClasses": [
                {**_CHAT, "default": True, "serviceTiers": ["default", "flex"]},
                {**_DOCUMENT, "serviceTiers": ["flex"]},
            ]
        },
        path="spec.sloClasses",
        message="a service tier is mapped to two classes",
    ),
    BadService(
        name="chunks-of-no-size",
        changes={"scheduling": {"preemption": "chunk"}},
        path="spec.scheduling.chunkTokens",
        message="preemption chunk needs chunkTokens",
    ),
    BadService(
        name="replicas-and-autoscaling",
        changes={"prefill": {"replicas": 2, "autoscaling": {"maxReplicas": 3}}},
        path="spec.prefill.replicas",
        message="set replicas or autoscaling, not both",
    ),
    BadService(
        name="proxy-replicas-and-autoscaling",
        changes={"proxy": {"replicas": 0, "autoscaling": {"maxReplicas": 3}}},
        path="spec.proxy.replicas",
        message="set replicas or autoscaling, not both",
    ),
    BadService(
        name="more-replicas-at-least-than-at-most",
        changes={"decode": {"autoscaling": {"minReplicas": 4, "maxReplicas": 3}}},
        path="spec.decode.autoscaling.minReplicas",
        message="minReplicas is above maxReplicas",
    ),
    BadService(
        name="keda-without-prometheus",
        changes={"prefill": {"autoscaling": {"maxReplicas": 3, "provider": "Keda"}}},
        path="spec.prefill.autoscaling.prometheusAddress",
        message="provider Keda needs prometheusAddress",
    ),
    BadService(
        name="prometheus-without-a-scheme",
        changes={
            "prefill": {"autoscaling": {"maxReplicas": 3, "provider": "Keda", "prometheusAddress": "foo"}}
        },
        path="spec.prefill.autoscaling.prometheusAddress",
        message="use an http:// or https:// URL",
    ),
    BadService(
        name="three-gpus-for-two-ranks",
        changes={"prefill": {"tensorParallelSize": 2, "resources": {"limits": {"nvidia.com/gpu": 3}}}},
        path="spec.prefill.tensorParallelSize",
        message="the limit of nvidia.com/gpu must be a multiple of tensorParallelSize",
    ),
    BadService(
        name="half-a-gpu",
        changes={"decode": {"resources": {"limits": {"nvidia.com/gpu": "500m"}}}},
        path="spec.decode.tensorParallelSize",
        message="the limit of nvidia.com/gpu must be a multiple of tensorParallelSize",
    ),
    BadService(
        name="one-port-for-both",
        changes={"proxy": {"portApi": 9000}},
        path="spec.proxy.portAdmin",
        message="portApi and portAdmin are the same",
    ),
    BadService(
        name="class-of-a-reserved-name",
        changes={"sloClasses": [{**_CHAT, "name": "other"}]},
        path="spec.sloClasses[0].name",
        message="the name other stands for requests of no class",
    ),
    BadService(
        name="profile-given-and-measured",
        changes={"scheduling": {"predictor": {"profilingJob": True, "profileConfigMap": "profile"}}},
        path="spec.scheduling.predictor.profilingJob",
        message="profilingJob measures what profileConfigMap holds already",
    ),
    BadService(
        name="one-gateway-twice",
        changes={"proxy": {"httpRoute": {"parentRefs": [{"name": "public"}, {"name": "public"}]}}},
        path="spec.proxy.httpRoute.parentRefs",
        message="two parentRefs name the same Gateway",
    ),
    BadService(
        name="one-gateway-whole-and-in-part",
        changes={
            "proxy": {
                "httpRoute": {
                    "parentRefs": [
                        {"name": "public", "namespace": "gateways"},
                        {"name": "public", "namespace": "gateways", "sectionName": "https"},
                    ]
                }
            }
        },
        path="spec.proxy.httpRoute.parentRefs",
        message="two parentRefs name the same Gateway",
    ),
    BadService(
        name="one-listener-twice",
        changes={"proxy": {"httpRoute": {"parentRefs": [{"name": "public", "sectionName": "https"}] * 2}}},
        path="spec.proxy.httpRoute.parentRefs",
        message="two parentRefs name the same Gateway",
    ),
    BadService(
        name="less-kv-than-one-block",
        changes={"engine": {"kvCacheTokens": 64, "blockSize": 128}},
        path="spec.engine.kvCacheTokens",
        message="kvCacheTokens is below blockSize",
    ),
    BadService(
        name="pull-longer-than-the-lease",
        changes={"kvTransfer": {"leaseSeconds": 10}},
        path="spec.kvTransfer.timeoutSeconds",
        message="timeoutSeconds is above leaseSeconds",
    ),
    BadService(
        name="colocated-with-decode-pods",
        changes={"mode": "Colocated", "decode": {"replicas": 1}},
        path="spec.decode",
        message="in mode Colocated the prefill pods also decode",
    ),
    BadService(
        name="rollout-shorter-than-a-start",
        changes={"decode": {"startupTimeoutSeconds": 7200}},
        path="spec.rollout.timeoutSeconds",
        message="rollout.timeoutSeconds is below the startupTimeoutSeconds of prefill or decode",
    ),
    BadService(
        name="kv-cache-below-the-longest-prompt",
        changes={"model": {"maxModelLen": 8192}, "engine": {"kvCacheTokens": 8191}},
        path="spec.engine.kvCacheTokens",
        message="engine.kvCacheTokens is below model.maxModelLen",
    ),
)
