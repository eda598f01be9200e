"""Kubelets of fake nodes whose pods are processes of this machine: a pod is Ready once its process reports so.

A pod's process gets SIGTERM when the pod is deleted, SIGKILL after the grace period, and the Pod is removed once the
process has ended. There are no containers, volumes or probes; the caller chooses the process and its place.

Guarantees:
- A pod has one process at most, and its Pod object is not removed before the process has ended.
- A process that ends by itself, or has to be killed, is a failure.
- Every started process ends with `stop`.
"""

from __future__ import annotations

import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from harness.api import Api, ApiError, Object
from harness.fakes import FakeKubelets

_GRACE_S = 10.0
"""Seconds that a process has to end after SIGTERM."""

Start = Callable[[Object, threading.Event], "subprocess.Popen[str] | None"]
"""Starts the process of a pod and returns it, with its standard output as a pipe. The process prints one line, its
address, once it is ready. Returns None if the event is set before: the pod is deleted."""


@dataclass
class PodProcess:
    """Process of one pod."""

    deleted: threading.Event = field(default_factory=threading.Event)
    process: subprocess.Popen[str] | None = None
    address: str | None = None
    """Line that the process printed once it was ready. None before."""
    ended_at: float | None = None
    """Monotonic time, in seconds, at which the process ended. None before."""
    thread: threading.Thread | None = None


class ProcessKubelets(FakeKubelets):
    """Simulated kubelets of some fake nodes, with one process for each pod.

    Args:
        api: The API server.
        nodes: Names of the nodes.
        start: Starts a pod's process.
        same: Returns the name of the job that a pod belongs to. `most_at_once`: largest number of processes of one job
            that ran at the same time.
    """

    def __init__(self, api: Api, nodes: Collection[str], start: Start, same: Callable[[Object], str]) -> None:
        super().__init__(api)
        self._nodes = frozenset(nodes)
        self._start = start
        self._same = same
        self._lock = threading.Lock()
        self._running: Counter[str] = Counter()
        self.processes: dict[str, PodProcess] = {}
        """Processes by the pod's UID, including processes of deleted pods."""
        self.most_at_once: Counter[str] = Counter()
        """For each name that `same` returns: the largest number of its processes that ran at the same time."""

    def stop(self) -> None:
        for each in list(self.processes.values()):
            each.deleted.set()
            if each.process is not None:
                each.process.kill()
        super().stop()
        for each in list(self.processes.values()):
            if each.thread is not None:
                each.thread.join(timeout=10)

    def _is_fake(self, node: str) -> bool:
        return node in self._nodes

    # Each step has its own thread, because a process may take long to start or to end.

    def _run(self, uid: str) -> None:
        pod = self._pods.get(uid)
        if pod is None or uid in self.processes:
            return
        own = self.processes[uid] = PodProcess()
        own.thread = threading.Thread(target=self._live, args=(pod, own), daemon=True)
        own.thread.start()

    def _go(self, uid: str) -> None:
        threading.Thread(target=self._leave, args=(uid,), daemon=True).start()

    def _live(self, pod: Object, own: PodProcess) -> None:
        uid, same = pod["metadata"]["uid"], self._same(pod)
        with self._lock:
            self._running[same] += 1
            self.most_at_once[same] = max(self.most_at_once[same], self._running[same])
        try:
            own.process = process = self._start(pod, own.deleted)
            if process is not None:
                if own.deleted.is_set():
                    process.terminate()
                assert process.stdout is not None
                own.address = process.stdout.readline().strip() or None
                if own.address is not None:
                    self._written(lambda: FakeKubelets._run(self, uid))
                code = process.wait()
                process.stdout.close()
                if not own.deleted.is_set():
                    self.failures.append(f"pod {pod['metadata']['name']} ended by itself with {code}")
        except Exception as error:
            self.failures.append(repr(error))
        finally:
            with self._lock:
                self._running[same] -= 1
            own.ended_at = time.monotonic()

    def _leave(self, uid: str) -> None:
        own = self.processes.get(uid)
        if own is not None and own.thread is not None:
            own.deleted.set()
            if own.process is not None:
                own.process.terminate()
            own.thread.join(timeout=_GRACE_S)
            if own.thread.is_alive() and own.process is not None:
                self.failures.append("a process had to be killed")
                own.process.kill()
                own.thread.join()
        self._written(lambda: FakeKubelets._go(self, uid))

    def _written(self, step: Callable[[], None]) -> None:
        """Take a step that writes to the API server. Retry it while the API server is away."""
        while not self._stopped.is_set():
            try:
                step()
            except ApiError as error:
                if error.code not in (404, 409):  # the pod was deleted, or another pod has its name
                    self.failures.append(str(error))
            except OSError:
                self._stopped.wait(0.2)
                continue
            return
