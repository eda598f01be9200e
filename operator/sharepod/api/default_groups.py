"""Default groups: Pods of one indexed Job, JobSet, TrainJob or Kubeflow training, which wait for each other.

Guarantees:
- The group follows only from the Pod's metadata, and is never a group name that a user can write.
- Pods of a Job without indexed completions are in no group: they do not depend on each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .bounds import MAX_GROUP

_INDEX = "batch.kubernetes.io/job-completion-index"
"""Annotation with the Pod's index. Only Pods of an indexed Job have it."""
_JOB_SET = "jobset.sigs.k8s.io/jobset-name"
"""Label of the Pods of all Jobs of a JobSet. A TrainJob creates a JobSet."""
_KUBEFLOW = "kubeflow.org/"
"""Beginning of the API version of PyTorchJob and Kubeflow's other trainings, which create Pods without a Job."""


def default_group(metadata: Mapping[str, Any]) -> str | None:
    """Return the default group of a Pod by its unchecked metadata. None: no group."""
    references = metadata.get("ownerReferences")
    for owner in references if isinstance(references, list) else ():
        if isinstance(owner, Mapping) and owner.get("controller"):
            kind, uid = str(owner.get("kind")), str(owner.get("uid"))
            break
    else:
        return None
    group: str | None = None
    if kind == "Job":
        job_set = _value(metadata, "labels", _JOB_SET)
        if job_set is not None:
            group = f"JobSet/{job_set}"
        elif _value(metadata, "annotations", _INDEX) is not None:
            group = f"Job/{uid}"
    elif str(owner.get("apiVersion")).startswith(_KUBEFLOW):
        group = f"{kind}/{uid}"
    return None if group is None else group[:MAX_GROUP]


def _value(metadata: Mapping[str, Any], field: str, key: str) -> str | None:
    entries = metadata.get(field)
    value = entries.get(key) if isinstance(entries, Mapping) else None
    return value if isinstance(value, str) else None
