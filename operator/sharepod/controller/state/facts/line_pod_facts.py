"""Facts of a plain Pod whose resource line is attached by a CSI volume, in the form of a SharePod's facts.

Such a Pod is its own tenant. Its request is read like a SharePod's, so the code that queues, places, preempts and
releases SharePods also handles it.

Guarantees:
- These functions do not raise for any object with a uid and a name.
- The operator never creates another Pod for such a tenant. The Pod's controller may create a next Pod, which is another
  tenant.
"""

from __future__ import annotations

from sharepod.api.default_groups import default_group
from sharepod.api.pods import plain_pods
from sharepod.api.pods.pod import PodSettings
from sharepod.api.sharepod import GpuRequest, Phase, RestartPolicy, SharePodStatus, SpecError
from sharepod.placement.state.types import PodNeeds

from .object_facts import Json, controller_of, mapping
from .pod_facts import PodFacts
from .sharepod_facts import SharePodFacts


def line_pod_facts(raw: Json, pod: PodFacts, settings: PodSettings) -> SharePodFacts:
    """Return the facts of a plain Pod as a SharePod's. `pod`: facts of the same Pod."""
    metadata = mapping(raw.get("metadata"))
    gpu, error = _asked(raw, settings)
    end = {"phase": Phase(pod.phase), "endTime": "ended"} if pod.ended else {}
    return SharePodFacts(
        uid=pod.uid,
        name=pod.name,
        namespace=pod.namespace,
        version=pod.version,
        generation=gpu.request_milli if gpu is not None else 0,
        created=str(metadata.get("creationTimestamp") or ""),
        deleting=pod.deleting,
        owner=controller_of(metadata, None),
        group=default_group(metadata),
        gpu=gpu,
        needs=pod.asks or PodNeeds(resources=pod.needs),
        error=error,
        status=SharePodStatus.model_validate(end),
        raw_text=b"",
        status_text=b"{}",
        restart_policy=RestartPolicy.NEVER,
        plain=True,
    )


def _asked(raw: Json, settings: PodSettings) -> tuple[GpuRequest | None, SpecError | None]:
    try:
        own = mapping(raw.get("spec")).get("runtimeClassName")
        if settings.runtime_class and own != settings.runtime_class:
            text = f"{own} does not attach the GPU; write {settings.runtime_class}, or leave it out in a new Pod"
            return None, SpecError("spec.runtimeClassName", text)
        return plain_pods.lower(raw).gpu, None
    except SpecError as error:
        return None, error
    except Exception as found:  # invalid content must affect this Pod only
        return None, SpecError("spec", f"cannot be read: {type(found).__name__}: {found}")
