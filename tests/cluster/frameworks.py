"""Pods as the controllers of KServe, KubeRay and JupyterHub make them of the manifests in examples/frameworks.

None of these controllers runs here. Each function applies that controller's changes to the Pod's resourceClaims,
containers and init containers, as read in the named file. Labels, probes, commands and variables, which do not affect
shares, are left out.
"""

from __future__ import annotations

import copy
from pathlib import Path

import yaml
from harness.api import Object
from harness.installation import MANIFESTS

FRAMEWORKS = MANIFESTS.parent / "examples" / "frameworks"
_RUNTIME_CONTAINER: Object = {
    "name": "kserve-container",
    "image": "test",
    "args": ["--model_name={{.Name}}"],
    "resources": {"requests": {"cpu": "1", "memory": "2Gi"}, "limits": {"cpu": "1", "memory": "2Gi"}},
}
"""Container of KServe's ClusterServingRuntime for models of Hugging Face."""
_OF_POD = ("nodeSelector", "affinity", "tolerations", "resourceClaims", "priorityClassName", "schedulerName")
"""Fields of a predictor that are also fields of a PodSpec, as far as the examples use them. Its other fields are
KServe's own."""


def documents(name: str) -> dict[str, Object]:
    """Return the documents of an example by kind. Helm values have no kind, so their key is empty."""
    found = yaml.safe_load_all((FRAMEWORKS / f"{name}.yaml").read_text())
    return {document.get("kind", ""): document for document in found}


def of_kserve(service: Object) -> list[Object]:
    """Return the PodSpecs of an InferenceService in deployment mode Standard, as its Deployment has them.

    kserve/kserve, pkg/controller/v1beta1/inferenceservice/utils/utils.go: MergePodSpec (the predictor's PodSpec over
    the runtime's) and MergeRuntimeContainers (a strategic merge of the model's container over the runtime's).
    """
    predictor = service["spec"]["predictor"]
    model = predictor["model"]
    container = copy.deepcopy(_RUNTIME_CONTAINER)
    for part in ("requests", "limits"):
        container["resources"][part] |= model["resources"].get(part, {})
    if "claims" in model["resources"]:
        container["resources"]["claims"] = model["resources"]["claims"]
    fetches = {"name": "storage-initializer", "image": "test", "resources": {"requests": {"cpu": "100m"}}}
    spec = {field: predictor[field] for field in _OF_POD if field in predictor}
    return [{**spec, "initContainers": [fetches], "containers": [container]}] * max(1, predictor["minReplicas"])


def of_knative(service: Object) -> list[Object]:
    """Return the PodSpecs of an InferenceService in deployment mode Knative.

    knative/serving, pkg/apis/serving/fieldmask.go: PodSpecMask and ResourceRequirementsMask contain no claims, so a
    revision with a claim is refused; requests and limits are kept. Knative's proxy runs next to the container.
    """
    specs = of_kserve(service)
    for spec in specs:
        assert "resourceClaims" not in spec
        assert spec["containers"][0]["resources"].keys() == {"requests", "limits"}
        del spec["initContainers"]
        spec["containers"].append({"name": "queue-proxy", "image": "test", "resources": {"requests": {"cpu": "25m"}}})
    return specs


def of_kuberay(cluster: Object) -> tuple[Object, list[Object]]:
    """Return the PodSpec of the head, and of each worker.

    ray-project/kuberay, ray-operator/controllers/ray/common/pod.go: BuildPod copies the template's spec and adds
    /dev/shm; DefaultWorkerPodTemplate adds an init container with its own resources.
    """
    head = _with_shm(cluster["spec"]["headGroupSpec"]["template"]["spec"])
    workers = []
    for group in cluster["spec"]["workerGroupSpecs"]:
        small = {"cpu": "200m", "memory": "256Mi"}
        waits = {"name": "wait-gcs-ready", "image": "test", "resources": {"limits": small, "requests": small}}
        spec = _with_shm(group["template"]["spec"]) | {"initContainers": [waits]}
        workers += [copy.deepcopy(spec) for _ in range(group["replicas"])]
    return head, workers


def _with_shm(template: Object) -> Object:
    spec = copy.deepcopy(template)
    spec["volumes"] = [{"name": "shared-mem", "emptyDir": {"medium": "Memory"}}]
    spec["containers"][0]["volumeMounts"] = [{"name": "shared-mem", "mountPath": "/dev/shm"}]
    return spec


def of_kubespawner(values: Object) -> Object:
    """Return the PodSpec of a user's server, from the values of JupyterHub's Helm chart. The chart passes `hub.config`
    to the spawner.

    jupyterhub/kubespawner 7.1, kubespawner/objects.py: make_pod sets each field of extra_container_config on the
    container and of extra_pod_config on the spec (update_k8s_model), replacing former values.
    """
    config = values["hub"]["config"]["KubeSpawner"]
    container: Object = {
        "name": "notebook",
        "image": "test",
        "ports": [{"name": "notebook-port", "containerPort": 8888}],
        "resources": {"requests": {"memory": "1Gi"}, "limits": {}},
        "securityContext": {"allowPrivilegeEscalation": False},
    } | config["extra_container_config"]
    spec: Object = {"automountServiceAccountToken": False, "restartPolicy": "OnFailure", "containers": [container]}
    return copy.deepcopy(spec | config["extra_pod_config"])


def examples() -> list[Path]:
    """Return the files of examples/frameworks."""
    return sorted(FRAMEWORKS.glob("*.yaml"))
