"""Nodes without machines, and a simulated kubelet for the pods bound to them.

Why not kwok: a test needs exact control of when a pod starts, ends, fails and disappears, and of nothing else
happening. This short file, in the test's own process, gives that without another large program and its stages.

The simulated kubelet writes what a kubelet writes: a bound pod gets status Running and Ready; a deleted pod gets its
terminal phase and is then removed; a pod that ends by itself gets Succeeded or Failed. Annotations on a pod change
this:

    test.sharepod.dev/start-seconds         seconds as Pending after it is bound; "never"       (0)
    test.sharepod.dev/run-seconds           seconds of running before it ends by itself         (unlimited)
    test.sharepod.dev/phase                 its phase then                                      (Succeeded)
    test.sharepod.dev/termination-seconds   seconds as Terminating after its deletion; "never"  (0)

Guarantees: a pod's steps happen in order; each is written at most once per pod UID; a cut watch is resumed and no event
is missed.
"""

from __future__ import annotations

import datetime
import heapq
import itertools
import math
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from harness.api import STRATEGIC, Api, ApiError, Object, Watch

FAKE_NODE_LABEL = "test.sharepod.dev/fake-node"
ANNOTATION = "test.sharepod.dev/"
_NEVER = math.inf
_GRACEFUL_EXIT = 143  # ended by SIGTERM


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def fake_node(name: str, *, cpu: str, memory: str, pods: int, labels: Mapping[str, str]) -> Object:
    """Return a Node as a healthy kubelet reports it. `cpu`, `memory`: Kubernetes quantities."""
    room = {"cpu": cpu, "memory": memory, "pods": str(pods), "ephemeral-storage": "1Ti"}
    now = _now()
    healthy = {"lastHeartbeatTime": now, "lastTransitionTime": now, "reason": "Fake", "message": "a node of the test"}
    pressures = ("MemoryPressure", "DiskPressure", "PIDPressure")
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "labels": {
                "kubernetes.io/hostname": name,
                "kubernetes.io/os": "linux",
                "kubernetes.io/arch": "amd64",
                FAKE_NODE_LABEL: "true",
                **labels,
            },
        },
        "status": {
            "capacity": room,
            "allocatable": room,
            "conditions": [
                {"type": "Ready", "status": "True", **healthy},
                *({"type": kind, "status": "False", **healthy} for kind in pressures),
            ],
            "addresses": [{"type": "Hostname", "address": name}],
            "nodeInfo": {
                "architecture": "amd64",
                "bootID": name,
                "containerRuntimeVersion": "fake://1",
                "kernelVersion": "fake",
                "kubeProxyVersion": "",
                "kubeletVersion": "v1.36.3",
                "machineID": name,
                "operatingSystem": "linux",
                "osImage": "fake",
                "systemUUID": name,
            },
        },
    }


class FakeKubelets:
    """Plays the kubelets of all fake nodes, in two threads, between `start` and `stop` (or in a `with` block)."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._changed = threading.Condition()
        self._due: list[tuple[float, int, str, Callable[[], None]]] = []  # heap of (time, order, pod UID, step)
        self._order = itertools.count()
        self._fake: set[str] = set()
        self._seen: dict[str, set[str]] = {}  # pod UID: steps planned
        self._pods: dict[str, Object] = {}  # pod UID: the pod as the watch last showed it
        self._stopped = threading.Event()
        self._watch: Watch | None = None
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._observe, self._act)]
        # refusals by the API server without a known cause; a test may assert that there are none
        self.failures: list[str] = []

    def start(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def stop(self) -> None:
        self._stopped.set()
        with self._changed:
            self._changed.notify_all()
        if self._watch is not None:
            self._watch.close()
        for thread in self._threads:
            thread.join(timeout=10)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def finish(self, namespace: str, name: str, *, phase: str = "Succeeded", exit_code: int | None = None) -> None:
        """End a running pod in phase Succeeded or Failed. Return once the phase is written."""
        self._terminate(self._api.get(f"/api/v1/namespaces/{namespace}/pods/{name}"), phase, exit_code)

    def forget(self) -> None:
        """Forget all steps and list again, because etcd was restored to an older state."""
        self._seen.clear()
        if self._watch is not None:
            self._watch.close()

    # Observation

    def _observe(self) -> None:
        while not self._stopped.is_set():
            try:
                self._follow()
            # the API server does not answer, or the version of the watch is too old
            except (OSError, ApiError, ValueError) as error:
                if isinstance(error, ApiError) and error.code not in (410, 429, 500, 503, 504):
                    self.failures.append(str(error))
                self._stopped.wait(0.1)
            except Exception as error:
                self.failures.append(repr(error))
                self._stopped.wait(0.1)

    def _follow(self) -> None:
        bound = "spec.nodeName!="
        listed = self._api.get("/api/v1/pods", fieldSelector=bound)
        present = {pod["metadata"]["uid"] for pod in listed["items"]}
        for uid in self._seen.keys() - present:
            self._forget(uid)
        for pod in listed["items"]:
            self._plan(pod)
        version = listed["metadata"]["resourceVersion"]
        watch = self._watch = self._api.watch("/api/v1/pods", fieldSelector=bound, resourceVersion=version)
        try:
            for event in watch:
                if self._stopped.is_set() or event["type"] == "ERROR":
                    return
                if event["type"] == "DELETED":
                    self._forget(event["object"]["metadata"]["uid"])
                else:
                    self._plan(event["object"])
        finally:
            watch.close()

    def _is_fake(self, node: str) -> bool:
        if node in self._fake:
            return True
        with suppress(ApiError):
            if FAKE_NODE_LABEL in self._api.get(f"/api/v1/nodes/{node}")["metadata"].get("labels", {}):
                self._fake.add(node)
                return True
        return False

    def _forget(self, uid: str) -> None:
        self._seen.pop(uid, None)
        self._pods.pop(uid, None)

    def _plan(self, pod: Object) -> None:
        """Schedule the step that this pod's state requires."""
        if not self._is_fake(pod["spec"]["nodeName"]):
            return
        metadata = pod["metadata"]
        uid = metadata["uid"]
        self._pods[uid] = pod
        planned = self._seen.setdefault(uid, set())
        phase = pod.get("status", {}).get("phase", "Pending")
        if "deletionTimestamp" in metadata:
            if "go" not in planned:
                planned.add("go")
                self._later(_seconds(pod, "termination-seconds", 0.0), uid, lambda: self._go(uid))
            return
        if phase == "Pending" and "run" not in planned:
            planned.add("run")
            self._later(_seconds(pod, "start-seconds", 0.0), uid, lambda: self._run(uid))
        elif phase == "Running" and "end" not in planned:
            planned.add("end")
            ending = metadata.get("annotations", {}).get(f"{ANNOTATION}phase", "Succeeded")
            self._later(_seconds(pod, "run-seconds", _NEVER), uid, lambda: self._end(uid, ending))

    def _later(self, seconds: float, uid: str, step: Callable[[], None]) -> None:
        if seconds != _NEVER:
            with self._changed:
                heapq.heappush(self._due, (time.monotonic() + seconds, next(self._order), uid, step))
                self._changed.notify_all()

    # Actions

    def _act(self) -> None:
        while True:
            with self._changed:
                while not self._stopped.is_set() and (not self._due or self._due[0][0] > time.monotonic()):
                    self._changed.wait(max(0.0, self._due[0][0] - time.monotonic()) if self._due else None)
                if self._stopped.is_set():
                    return
                _, _, uid, step = heapq.heappop(self._due)
            try:
                step()
            except ApiError as error:
                if error.code not in (404, 409):  # the pod was deleted, or another pod has its name: no step is left
                    self.failures.append(str(error))
            except OSError:  # the API server does not answer: retry the step later
                self._later(0.2, uid, step)
            except Exception as error:
                self.failures.append(repr(error))

    def _run(self, uid: str) -> None:
        pod = self._pods.get(uid)
        if pod is None or "deletionTimestamp" in pod["metadata"]:
            return
        now = _now()
        state = {"running": {"startedAt": now}}
        number = int(uid.replace("-", "")[:6], 16)
        address = f"10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}"
        conditions = ("PodReadyToStartContainers", "Initialized", "ContainersReady", "Ready")
        self._write_status(
            pod,
            {
                "phase": "Running",
                "startTime": now,
                "hostIP": "192.0.2.10",
                "podIP": address,
                "podIPs": [{"ip": address}],
                "conditions": [{"type": kind, "status": "True", "lastTransitionTime": now} for kind in conditions],
                "containerStatuses": _containers(pod, ready=True, state=state),
            },
        )

    def _end(self, uid: str, phase: str) -> None:
        if pod := self._pods.get(uid):
            self._terminate(pod, phase, None)

    def _go(self, uid: str) -> None:
        pod = self._pods.get(uid)
        if pod is None:
            return
        if pod.get("status", {}).get("phase") not in ("Succeeded", "Failed"):
            self._terminate(pod, "Failed", _GRACEFUL_EXIT)
        self._api.delete(_path(pod), grace=0, uid=uid)

    def _terminate(self, pod: Object, phase: str, exit_code: int | None) -> None:
        now = _now()
        code = (0 if phase == "Succeeded" else 1) if exit_code is None else exit_code
        reason = "Completed" if code == 0 else "Error"
        ended = {"terminated": {"exitCode": code, "reason": reason, "finishedAt": now}}
        why = {"status": "False", "reason": "PodCompleted", "lastTransitionTime": now}
        self._write_status(
            pod,
            {
                "phase": phase,
                "conditions": [{"type": kind, **why} for kind in ("ContainersReady", "Ready")],
                "containerStatuses": _containers(pod, ready=False, state=ended),
            },
        )

    def _write_status(self, pod: Object, status: Object) -> None:
        body = {"metadata": {"uid": pod["metadata"]["uid"]}, "status": status}
        self._api.patch(f"{_path(pod)}/status", body, content_type=STRATEGIC)


def _path(pod: Object) -> str:
    return f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}"


def _containers(pod: Object, *, ready: bool, state: Object) -> list[Object]:
    return [
        {
            "name": container["name"],
            "image": container.get("image", ""),
            "imageID": "",
            "containerID": f"fake://{pod['metadata']['uid']}/{container['name']}",
            "ready": ready,
            "started": ready,
            "restartCount": 0,
            "state": state,
        }
        for container in pod["spec"]["containers"]
    ]


def _seconds(pod: Object, name: str, default: float) -> float:
    value: Any = pod["metadata"].get("annotations", {}).get(ANNOTATION + name)
    if value is None:
        return default
    return _NEVER if value == "never" else float(value)
