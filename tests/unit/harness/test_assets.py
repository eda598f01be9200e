"""Choice of prebuilt programs: a folder is used as it is, completed, or refused with a remedy."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import build, releases
from harness.assets import OPTIONAL, REQUIRED, VARIABLE, Assets, find_assets
from harness.errors import AssetsError

BUILT = (1, 36)
SIX = (*REQUIRED, *OPTIONAL)
_folders = itertools.count()

MakeFolder = Callable[..., Path]


@pytest.fixture
def folder(tmp_path: Path) -> MakeFolder:
    """Return a function that creates a folder of programs which only print their version. Each call creates a
    new folder."""

    def make(*names: str, version: str = "1.36.1", own: dict[str, str] | None = None) -> Path:
        made = tmp_path / f"folder-{next(_folders)}"
        made.mkdir()
        for name in names:
            (made / name).write_text(f"#!/bin/sh\necho Kubernetes v{(own or {}).get(name, version)}\n")
            (made / name).chmod(0o755)
        return made

    return make


def found(folder: Path, *, kubelet: bool = True) -> Assets:
    assets = find_assets({VARIABLE: str(folder)}, built=BUILT, kubelet=kubelet)
    assert assets is not None
    return assets


@pytest.mark.parametrize("environment", [{}, {VARIABLE: ""}])
def test_without_the_variable_everything_is_built(environment: dict[str, str]) -> None:
    assert find_assets(environment, built=BUILT, kubelet=True) is None


def test_a_folder_with_all_programs_needs_nothing_built(folder: MakeFolder) -> None:
    assets = found(folder(*SIX, version="1.30.0"))
    assert (assets.version, set(assets.present), assets.lacking) == ((1, 30, 0), set(SIX), ())
    assert assets.emulated is None


def test_what_setup_envtest_does_not_bring_is_built_and_said_in_one_line(folder: MakeFolder) -> None:
    where = folder(*REQUIRED)
    assets = found(where)
    assert (assets.lacking, assets.emulated) == (OPTIONAL, None)
    assert assets.describe() == (
        f"etcd, kube-apiserver, kubectl of Kubernetes 1.36.1 from {where} (KUBEBUILDER_ASSETS); "
        "kube-controller-manager, kube-scheduler, kubelet built here"
    )


def test_only_a_real_node_needs_a_kubelet(folder: MakeFolder) -> None:
    where = folder(*REQUIRED, "kube-controller-manager", "kube-scheduler")
    assert found(where).lacking == ("kubelet",)
    assert found(where, kubelet=False).lacking == ()


@pytest.mark.parametrize(
    ("version", "emulated"), [("1.33.0", "1.33"), ("1.35.9", "1.35"), ("1.36.0", None), ("1.37.0", None)]
)
def test_built_programs_emulate_an_older_api_server(folder: MakeFolder, version: str, emulated: str | None) -> None:
    assets = found(folder(*REQUIRED, version=version))
    assert assets.emulated == emulated
    assert ("emulating" in assets.describe()) == (emulated is not None)


@pytest.mark.parametrize("version", ["1.30.5", "1.32.9", "1.38.0", "2.0.0"])
def test_an_api_server_that_built_programs_cannot_work_with_is_refused(folder: MakeFolder, version: str) -> None:
    where = folder(*REQUIRED, "kubelet", version=version)
    with pytest.raises(AssetsError) as refused:
        found(where)
    message = str(refused.value)
    assert (
        f"{where} lacks kube-controller-manager, kube-scheduler, and those built here are of Kubernetes 1.36" in message
    )
    minor = version.rpartition(".")[0]
    assert f"put kube-controller-manager, kube-scheduler of {minor} there" in message
    assert "choose binaries of 1.33 to 1.37" in message


def test_an_api_server_before_the_oldest_is_refused_even_with_all_programs(folder: MakeFolder) -> None:
    with pytest.raises(AssetsError, match=r"is Kubernetes 1\.29\.9, and SharePod needs 1\.30 or newer: set KUBEB"):
        found(folder(*SIX, version="1.29.9"))


def test_a_program_of_another_minor_version_is_refused(folder: MakeFolder) -> None:
    where = folder(*SIX, version="1.34.1", own={"kubelet": "1.33.0"})
    with pytest.raises(
        AssetsError, match=r"kubelet is Kubernetes 1\.33\.0, .* put kubelet of 1\.34 there, or remove it"
    ):
        found(where)


def test_a_folder_that_is_none_or_lacks_a_program_is_refused(folder: MakeFolder, tmp_path: Path) -> None:
    with pytest.raises(AssetsError, match=r"names .*/absent, which is no folder: set KUBEBUILDER_ASSETS"):
        found(tmp_path / "absent")
    with pytest.raises(AssetsError, match="which lacks etcd, kubectl: set KUBEBUILDER_ASSETS"):
        found(folder("kube-apiserver"))
    where = folder(*REQUIRED)
    (where / "etcd").chmod(0o644)
    with pytest.raises(AssetsError, match="which lacks etcd: "):
        found(where)


def test_a_program_without_a_version_is_refused(folder: MakeFolder) -> None:
    broken = folder(*REQUIRED)
    (broken / "kube-apiserver").write_text("#!/bin/sh\necho no such flag >&2\nexit 2\n")
    with pytest.raises(AssetsError, match=r"kube-apiserver --version` failed \(2\), 'no such flag': set"):
        found(broken)
    foreign = folder(*REQUIRED)
    (foreign / "etcd").write_bytes(b"\x7fELF of another processor")
    with pytest.raises(AssetsError, match="etcd does not run here"):
        found(foreign)
    silent = folder(*REQUIRED)
    (silent / "kube-apiserver").write_text("#!/bin/sh\necho hello\n")
    with pytest.raises(AssetsError, match="names no version of Kubernetes but prints 'hello'"):
        found(silent)


def test_folder_and_built_programs_stand_side_by_side(
    folder: MakeFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHAREPOD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("os.geteuid", lambda: 0)
    where = folder(*REQUIRED, "kube-scheduler", version="1.35.0")
    monkeypatch.setenv(VARIABLE, str(where))
    assert build.to_build({VARIABLE: str(where)}) == ("kube-controller-manager", "kubelet")
    own = tmp_path / "cache" / f"bin-{build.build_key()}"
    own.mkdir(parents=True)
    assert build.to_build({VARIABLE: str(where)}) == ()
    for _ in range(2):
        programs = build.programs()
        assert programs.emulated == "1.35"
        assert {name: (programs.bin / name).readlink().parent for name in releases.PROGRAMS} == {
            name: own if name in ("kube-controller-manager", "kubelet") else where for name in releases.PROGRAMS
        }


def test_a_folder_with_all_programs_is_used_where_it_is(
    folder: MakeFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SHAREPOD_CACHE", str(tmp_path / "cache"))
    where = folder(*SIX)
    monkeypatch.setenv(VARIABLE, str(where))
    assert build.programs().bin == build.programs().bin == where
    assert capsys.readouterr().err.count(str(where)) == 1


@pytest.mark.parametrize(
    ("done", "seconds", "printed"),
    [
        (10, 30.0, ""),
        (500, 60.0, ", about 4 min left"),
        (1900, 250.0, ", about a minute left"),
        (2000, 300.0, ", about a minute left"),
    ],
)
def test_a_build_prints_the_remaining_time(done: int, seconds: float, printed: str) -> None:
    assert build.time_left(done, 2000, seconds) == printed
