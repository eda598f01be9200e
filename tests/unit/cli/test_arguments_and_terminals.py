"""Arguments, terminals and formats of the kubectl plugin: the words that users type, and the output that they get."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from chart import plugin
from kubectl_sharepod import commands
from kubectl_sharepod.kubectl import Json, Kubectl, path
from kubectl_sharepod.output import Format, Page, Screen, drawn, fitting, show
from kubectl_sharepod.preflight import Verdict
from kubectl_sharepod.reading import Scope
from kubectl_sharepod.why import why

from .fleet import UUIDS, Memory, cluster
from .test_commands import CLI, TEAM, ran


@pytest.mark.parametrize("width", [10, 20, 40, 60])
def test_a_narrow_terminal_gets_clipped_lines(width: int) -> None:
    screen = Screen(io.StringIO(), width, colours=False)
    table = drawn(commands.all_gpus(Scope(cluster(), None)), screen)
    assert max(map(len, table)) <= width


@pytest.mark.parametrize(
    ("words", "became"),
    [
        (("logs", "-f", "train"), ["logs", "--namespace", TEAM, "train", "-f"]),
        (("logs", "--tail", "5", "-n", TEAM, "train"), ["logs", "--namespace", TEAM, "train", "--tail", "5"]),
        (("exec", "-it", "train", "--", "sh", "-l"), ["exec", "--namespace", TEAM, "train", "-it", "--", "sh", "-l"]),
        (("-n", TEAM, "exec", "-c", "main", "train", "--", "id"),
         ["exec", "--namespace", TEAM, "train", "-c", "main", "--", "id"]),
        (("--context", "logs", "port-forward", "train", "80"), ["port-forward", "--namespace", TEAM, "train", "80"]),
    ],
)  # fmt: skip
def test_flags_of_kubectl_count_before_the_name_too(
    words: tuple[str, ...], became: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[str]] = []

    def become(_self: Kubectl, given: list[str]) -> None:
        seen.append(given)
        sys.exit(0)

    monkeypatch.setattr(Kubectl, "become", become)
    with pytest.raises(SystemExit) as end:
        ran(cluster(), *words, monkeypatch=monkeypatch)
    assert (end.value.code, seen) == (0, [became])


def test_the_namespace_counts_before_the_command_too(monkeypatch: pytest.MonkeyPatch) -> None:
    status, text = ran(cluster(), "-n", TEAM, "top", "-o", "name", monkeypatch=monkeypatch)
    assert (status, "sharepod/train" in text) == (0, True)
    assert "in namespace later" in ran(later(), "-n", TEAM, "top", "-n", "later", monkeypatch=monkeypatch)[1]
    assert ran(cluster(), "-n", TEAM, "free", monkeypatch=monkeypatch)[0] == 0


def later() -> Memory:
    kubectl = cluster()
    kubectl.objects["/apis/sharepod.dev/v1alpha1/namespaces/later/sharepods"] = {"items": []}
    return kubectl


def test_a_watch_outlives_a_failed_read_and_names_what_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    kubectl = cluster(denied=("/apis/sharepod.dev/v1alpha1/gpunodes",))
    sharepods = "/apis/sharepod.dev/v1alpha1/namespaces/team/sharepods"
    kept = kubectl.objects[sharepods]
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 1:
            del kubectl.objects[sharepods]
        elif len(pauses) == 2:
            kubectl.objects[sharepods] = kept
        else:
            raise KeyboardInterrupt

    monkeypatch.setattr("kubectl_sharepod.program.time.sleep", sleep)
    status, text = ran(kubectl, "top", "--watch", monkeypatch=monkeypatch)
    shown = text.split("You may not list GPUNodes")
    assert (status, len(shown)) == (0, 4)
    assert ["error: SharePod is not installed" in one for one in shown[:3]] == [False, True, False]
    assert [one.count("train") for one in shown[1:]] == [1, 1, 1]
    assert "\x1b" not in text


def test_a_refreshed_terminal_shows_its_first_rows_and_counts_the_others() -> None:
    lines = [str(number) for number in range(10)]
    assert fitting(lines, Screen(io.StringIO(), 80, colours=False)) == lines
    terminal = Screen(io.StringIO(), 80, colours=False, rows=5)
    assert fitting(lines, terminal) == ["\x1b[H\x1b[J0", "1", "2", "… 7 more lines"]
    assert len(fitting(lines[:4], terminal)) == 4


@pytest.mark.parametrize(
    ("environment", "colours", "rows"),
    [({"TERM": "xterm"}, True, 24), ({"TERM": "dumb"}, False, None), ({"TERM": "xterm", "NO_COLOR": ""}, False, 24)],
)
def test_a_dumb_terminal_gets_neither_colours_nor_control_sequences(
    environment: dict[str, str], colours: bool, rows: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in (environment | {"COLUMNS": "80", "LINES": "24"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    screen = Screen.of_process()
    assert (screen.colours, screen.rows, screen.columns) == (colours, rows, 80)


def test_enums_and_equal_objects_are_plain_yaml() -> None:
    same = {"verdict": Verdict.WARNING}
    shown = io.StringIO()
    show(Page(items=lambda: [same, same]), Format.YAML, Screen(shown, None, colours=False))
    assert shown.getvalue() == "items:\n- verdict: warning\n- verdict: warning\n"


def test_a_name_of_bytes_that_are_no_text_is_a_name() -> None:
    assert path("sharepods", "a b", os.fsdecode(b"\xff")).endswith("/namespaces/a%20b/sharepods/%FF")


@pytest.mark.parametrize("words", [("top", "-n", ".."), ("top", "-n", "a/../.."), ("why", "."), ("why", "pod/%2e%2e")])
def test_a_name_that_leads_to_another_path_is_no_name(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ran(cluster(), *words, monkeypatch=monkeypatch)[0] == 2
    assert "is no name of an object" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (("why", "large"), "sharepod/large\n"),
        (("why", "train"), "sharepod/train\n"),
        (("doctor",), "node-b\n"),
        (("free",), "NVIDIA A100-SXM4-80GB\n"),
    ],
)
def test_names_are_one_line_for_each_object(
    words: tuple[str, ...], names: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kubectl = cluster()
    gpunodes = kubectl.objects["/apis/sharepod.dev/v1alpha1/gpunodes"]["items"]
    gpunodes[0]["spec"]["pool"] = "device-plugin"
    assert ran(kubectl, *words, "-o", "name", monkeypatch=monkeypatch)[1] == names


@pytest.mark.parametrize("function", ["main", "complete"])
def test_ctrl_c_while_modules_are_loaded_ends_silently(function: str, tmp_path: Path) -> None:
    (tmp_path / "argparse.py").write_text("raise KeyboardInterrupt\n")
    start = f"import sys; sys.path[:0] = {[str(tmp_path), str(CLI)]}; from kubectl_sharepod import __main__ as entry"
    command = [sys.executable, "-c", f"{start}; entry.{function}()"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_every_program_begins_with_the_entry_that_ctrl_c_ends_silently() -> None:
    scripts = tomllib.loads((CLI / "pyproject.toml").read_text())["project"]["scripts"]
    assert {entry.partition(":")[0] for entry in scripts.values()} == {"kubectl_sharepod.__main__"}
    assert "from kubectl_sharepod.__main__ import main" in plugin._MAIN


@pytest.mark.parametrize(
    ("words", "annotations", "container"),
    [
        (("logs", "train", "-f"), {}, "main"),
        (("exec", "train", "--", "sh"), {}, "main"),
        (("logs", "train", "--all-containers"), {}, None),
        (("exec", "train", "--", "sh", "--all-containers"), {}, "main"),
        (("logs", "train"), {"kubectl.kubernetes.io/default-container": "second"}, "second"),
        (("port-forward", "train", "80"), {}, None),
        (("logs", "pod/train"), {}, None),
    ],
)
def test_the_first_container_of_the_sharepods_spec_is_the_default(
    words: tuple[str, ...], annotations: dict[str, str], container: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    kubectl = cluster()
    train = kubectl.objects["/apis/sharepod.dev/v1alpha1/namespaces/team/sharepods/train"]
    train["spec"]["containers"] = [{"name": "main"}, {"name": "second"}]
    train["metadata"]["annotations"] = annotations
    seen: list[list[str]] = []

    def become(_self: Kubectl, given: list[str]) -> None:
        seen.append(given)
        sys.exit(0)

    monkeypatch.setattr(Kubectl, "become", become)
    with pytest.raises(SystemExit):
        ran(kubectl, *words, monkeypatch=monkeypatch)
    default = [f"--container={container}"] if container else []
    assert seen == [[words[0], "--namespace", TEAM, "train", *default, *words[2:]]], "before any -c, so that counts"


@pytest.mark.parametrize("words", [("top", "--kubeconfig=/nope"), ("--kubeconfig", "/nope", "gpus")])
def test_a_kubeconfig_that_does_not_exist_is_named(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ran(cluster(), *words, monkeypatch=monkeypatch)[0] == 2
    assert "the kubeconfig /nope does not exist" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("width", "titles"),
    [
        (160, ["NAMESPACE", "KIND", "NAME", "STATE", "NODE", "GPU", "REQUEST", "LIMIT", "USED", "PROGRESS", "MEMORY"]),
        (80, ["NAMESPACE", "KIND", "NAME", "STATE", "NODE", "GPU"]),
        (60, ["NAMESPACE", "KIND", "NAME", "NODE"]),
        (40, ["NAMESP…", "NAME", "NODE"]),
    ],
)
def test_a_narrow_terminal_loses_columns_from_the_right_and_no_part_of_a_name(width: int, titles: list[str]) -> None:
    kubectl = cluster()
    long = "notebook-of-a-long-name"
    tenants = kubectl.objects["/apis/sharepod.dev/v1alpha1/gpunodes"]["items"][0]["spec"]["tenants"]
    tenants[1]["podName"] = long
    page = commands.top(Scope(kubectl, None))
    lines = drawn(page, Screen(io.StringIO(), width, colours=False))[len(page.before) :]
    assert lines[0].split()[: len(titles)] == titles
    assert max(map(len, lines)) <= width
    assert sum(long in line for line in lines) == 1
    assert any("GPU" in line for line in lines) is (width >= 80)


def test_columns_that_grow_stay_on_a_narrow_terminal() -> None:
    for width in (20, 40, 60):
        shown = drawn(why(cluster(), TEAM, "sharepod", "large"), Screen(io.StringIO(), width, colours=False))
        assert any("time" in line for line in shown), "the reason"


def test_top_does_not_deny_what_its_user_may_not_see(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = Memory(objects=later().objects, denied=("/apis/sharepod.dev/v1alpha1/gpunodes",))
    assert ran(hidden, "top", "-n", "later", monkeypatch=monkeypatch)[1] == "No SharePod in namespace later\n"


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize(("word", "kind"), [("train", "SharePod"), ("pod/notebook", "Pod"), ("claim/eval", "Claim")])
def test_why_as_json_names_the_workload_and_what_it_has(
    word: str, kind: str, hidden: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kubectl = cluster(denied=("/apis/sharepod.dev/v1alpha1/gpunodes",) if hidden else ())
    train = kubectl.objects["/apis/sharepod.dev/v1alpha1/namespaces/team/sharepods/train"]
    train["status"]["gpus"] = [{"uuid": UUIDS[0]}]
    limits = {"sharepod.dev/gpu-milli": "400"}
    more: dict[str, Json] = {
        "/api/v1/namespaces/team/events": {"items": []},
        "/api/v1/namespaces/team/pods/notebook": {
            "metadata": {"name": "notebook", "uid": "uid-notebook", "annotations": {"sharepod.dev/gpus": UUIDS[0]}},
            "spec": {"nodeName": "node-a", "containers": [{"resources": {"limits": limits}}]},
        },
        "/apis/resource.k8s.io/v1/namespaces/team/resourceclaims/eval": {
            "metadata": {"name": "eval", "uid": "uid-eval"},
            "status": {
                "allocation": {"devices": {"results": [{"pool": "node-a", "device": UUIDS[1]}]}},
                "devices": [{"data": {"requestMilli": 600, "limitMilli": 1000, "memory": 60 << 30}}],
            },
        },
    }
    kubectl.objects.update(more)
    (item,) = json.loads(ran(kubectl, "why", word, "-o", "json", monkeypatch=monkeypatch)[1])["items"]
    name = word.rpartition("/")[2]
    assert [item[key] for key in ("kind", "namespace", "name", "placed")] == [kind, TEAM, name, True]
    assert (item["node"], item["gpus"]) == ("node-a", [UUIDS[1 if name == "eval" else 0]])
    requests = {"train": 500, "notebook": 200, "eval": 600}
    assert (item["share"] or {}).get("request_milli") == (None if hidden and name == "notebook" else requests[name])


def test_why_as_json_names_a_workload_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    (item,) = json.loads(ran(cluster(), "why", "large", "-o", "json", monkeypatch=monkeypatch)[1])["items"]
    assert [item[key] for key in ("kind", "namespace", "name", "placed")] == ["SharePod", TEAM, "large", False]
