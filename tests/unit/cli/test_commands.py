"""Commands of the kubectl plugin, on a cluster in memory."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import generate
import pytest
from kubectl_sharepod import commands, completion, program
from kubectl_sharepod.completion import completions
from kubectl_sharepod.doctor import doctor
from kubectl_sharepod.kubectl import UNKNOWN_KIND, ForbiddenError, Json, Kubectl, KubectlError, NotFoundError
from kubectl_sharepod.output import Format, Page, Screen, show
from kubectl_sharepod.reading import Scope
from kubectl_sharepod.resize import resize
from kubectl_sharepod.views import fleet
from kubectl_sharepod.wanted import Wanted
from kubectl_sharepod.why import obstacle, smallest_change, target, why

from .fleet import GI, MODEL, UUIDS, Memory, cluster, gpunode, row

TEAM = "team"
CLI = Path(program.__file__).parents[1]


def printed(page: Page, width: int = 160, how: Format = Format.TABLE) -> str:
    """Return a page as a terminal of this width prints it, without blanks at the ends of lines."""
    file = io.StringIO()
    show(page, how, Screen(file, width, colours=False))
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def ran(kubectl: Kubectl, *words: str, monkeypatch: pytest.MonkeyPatch) -> tuple[int, str]:
    """Return exit status and output of a command line."""
    monkeypatch.setattr(program, "Kubectl", lambda *_: kubectl)
    file = io.StringIO()
    return program.run(words, to=Screen(file, 160, colours=False)), file.getvalue()


def test_top_shows_workloads_of_every_door_and_those_that_wait() -> None:
    page = commands.top(Scope(cluster(), TEAM))
    lines = printed(page).splitlines()
    assert lines[0] == "3 GPUs on 2 nodes, 1.3 requested; 1 workload waits"
    shown = {line.split()[1]: line.split() for line in lines[2:]}
    assert shown["train"][:10] == ["SharePod", "train", "Running", "node-a", "0", "0.5", "1", "0.22", "0.93", "8Gi"]
    assert shown["notebook"][:6] == ["Pod", "notebook", "Running", "node-a", "0", "0.2"]
    assert shown["eval"][:6] == ["Claim", "eval", "Running", "node-a", "1", "0.6"]
    assert shown["large"][:6] == ["SharePod", "large", "NoRoom", "-", "-", "0.9"]
    assert shown["large"][-1].endswith("d"), "days since it was created"


@pytest.mark.parametrize("width", [80, 160])
def test_a_table_is_no_wider_than_the_terminal(width: int) -> None:
    for page in (commands.top(Scope(cluster(), None)), commands.all_gpus(Scope(cluster(), None))):
        lines = printed(page, width).splitlines()
        assert max(map(len, lines)) <= width
        assert len(lines) == len(page.before) + 1 + len(page.rows), "each row is one line"


def test_gpus_and_free_count_what_new_tenants_can_have() -> None:
    gpus = printed(commands.all_gpus(Scope(cluster(), None))).splitlines()
    assert [line.split()[:2] for line in gpus[1:]] == [["node-a", "0"], ["node-a", "1"], ["node-b", "0"]]
    assert "the agent does not renew its Lease" in gpus[3]
    free = printed(commands.free(Scope(cluster(), None))).splitlines()
    assert free[1].removeprefix(MODEL).split() == ["dedicated", "3", "0", "0.7", "0.4", "20Gi"]


PUBLISHED = "/api/v1/namespaces/sharepod-system/configmaps/sharepod-free"


def test_a_user_who_may_not_list_gpunodes_sees_the_published_free_shares() -> None:
    kubectl = cluster(denied=("/apis/sharepod.dev/v1alpha1/gpunodes",))
    with pytest.raises(ForbiddenError, match="not published in this cluster"):
        commands.free(Scope(kubectl, TEAM))
    kubectl.objects[PUBLISHED] = {"metadata": {"name": "sharepod-free"}}
    with pytest.raises(KubectlError, match="not published the free shares yet"):
        commands.free(Scope(kubectl, TEAM))
    entry = {"model": MODEL, "pool": "dedicated", "gpus": 3, "unused": 0, "freeMilli": 700}
    largest = {"requestMilli": 400, "memory": 20 * GI}
    items = [entry | {"largest": largest}, entry | {"model": "L4", "largest": None}]
    kubectl.objects[PUBLISHED]["data"] = {"free.json": json.dumps(items)}
    mine = commands.free(Scope(kubectl, TEAM))
    assert mine.rows[0] == commands.free(Scope(cluster(), None)).rows[0], "as an administrator sees them"
    assert mine.rows[1][-2:] == ["0", "0Mi"]


def test_who_takes_a_place_or_the_beginning_of_a_uuid() -> None:
    scope = Scope(cluster(), None)
    by_place, by_uuid = commands.who(scope, "node-a:0"), commands.who(scope, UUIDS[0])
    assert by_place.names == by_uuid.names == ["sharepod/train", "pod/notebook"]
    assert commands.who(scope, UUIDS[0].upper()).names == by_place.names
    with pytest.raises(KubectlError, match="write NODE:INDEX or a UUID"):
        commands.who(scope, "node-z:0")


def test_a_user_of_one_namespace_sees_its_sharepods_and_is_told_what_is_missing() -> None:
    kubectl = cluster(denied=("/apis/sharepod.dev/v1alpha1/gpunodes", "/apis/sharepod.dev/v1alpha1/sharepods"))
    page = commands.top(Scope(kubectl, TEAM))
    assert page.names == ["sharepod/large", "sharepod/train"]
    assert "sharepod-gpunode-view" in page.notes[0]
    with pytest.raises(ForbiddenError, match="sharepod-gpunode-view"):
        commands.free(Scope(kubectl, TEAM))
    answer = why(kubectl, TEAM, "sharepod", "large")
    assert "Placed: NoRoom: no GPU has 0.9 of its time free" in printed(answer)


def test_why_names_the_obstacle_of_each_gpu_and_the_smallest_change() -> None:
    page = why(cluster(), TEAM, "sharepod", "large")
    text = printed(page)
    assert page.status == 1
    assert "time: 0.3 free, 0.9 requested" in text
    assert "the agent does not renew its Lease" in text
    assert "Smallest change that a GPU has room for: request 0.4 (node node-a)" in text
    assert why(cluster(), TEAM, "sharepod", "train").status == 0


@pytest.mark.parametrize(
    ("wanted", "change"),
    [
        (Wanted(300, 30 * GI), ""),
        (Wanted(300, 64 * GI), "memory 32Gi (node node-a)"),
        (Wanted(400, 30 * GI), "request 0.3 (node node-a)"),
        (Wanted(300, 30 * GI, count=2), "memory 20Gi (node node-a)"),
        (Wanted(300, 30 * GI, count=3), ""),
        (Wanted(1000, None, exclusive=True), ""),
        (Wanted(800, None), "request 0.3 (node node-a)"),
    ],
)
def test_the_smallest_change_followed_has_no_obstacle(wanted: Wanted, change: str) -> None:
    gpus = fleet(cluster().get("/apis/sharepod.dev/v1alpha1/gpunodes")["items"]).gpus
    assert smallest_change(gpus, wanted) == change
    if change:
        field, value, *_ = change.split()
        milli = round(float(value) * 1000) if field == "request" else wanted.request_milli
        memory = int(float(value.removesuffix("Gi")) * GI) if field == "memory" else wanted.memory
        followed = Wanted(milli, memory, wanted.count)
        assert sum(not obstacle(gpu, followed) for gpu in gpus) >= wanted.count


def test_the_readme_shows_the_output_of_top_and_why() -> None:
    pages = printed(commands.top(Scope(cluster(), TEAM))) + "\n" + printed(why(cluster(), TEAM, "sharepod", "large"))
    readme = (Path(commands.__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    block = readme.partition("top -A --watch\n")[2].partition("\n|")[0]
    shown = [line.strip() for line in block.splitlines() if line.strip() and "$ kubectl" not in line]
    assert len(shown) == 10
    assert set(shown) <= {re.sub(r" +\d+[smhd]$", "     2h", line) for line in pages.splitlines()}, "at any age"


def test_a_waiting_pod_with_a_line_is_compared_by_its_line() -> None:
    kubectl = cluster()
    limits = {"sharepod.dev/gpu-milli": "400", "sharepod.dev/gpu-memory-mib": "40960"}
    kubectl.objects["/api/v1/namespaces/team/pods/one"] = {
        "metadata": {"name": "one"},
        "spec": {"containers": [{"resources": {"limits": limits}}]},
        "status": {
            "conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "m"}]
        },
    }
    kubectl.objects["/api/v1/namespaces/team/events"] = {"items": [{"reason": "NoRoom", "message": "no room"}] * 3}
    text = printed(why(kubectl, TEAM, "pod", "one"))
    assert text.count("NoRoom: no room") == 1
    assert "memory: 20Gi free, 40Gi requested" in text


def test_scheduling_labels_are_obstacles_within_their_namespace() -> None:
    tenant = row("kept", (0,), 100, 1, labels={"exclusion": "mine", "antiAffinity": "apart", "affinity": "pair"})
    gpus = fleet([gpunode("node-a", {0: 0, 1: 1}, [tenant])]).gpus
    asks = Wanted(100, GI, namespace=TEAM)

    def answers(wanted: Wanted) -> list[str]:
        return [obstacle(gpu, wanted) for gpu in gpus]

    assert answers(asks) == ["an exclusion label keeps it", ""]
    assert answers(replace(asks, exclusion="mine")) == ["", ""]
    assert answers(replace(asks, exclusion="mine", namespace="other")) == [
        "it has tenants without the exclusion label mine",
        "",
    ]
    apart = replace(asks, exclusion="mine", anti_affinity="apart")
    assert answers(apart) == ["a tenant with its anti-affinity label apart is on it", ""]
    assert smallest_change(gpus[:1], replace(asks, request_milli=1000)) == "", "no change helps against a label"


@pytest.mark.parametrize(
    ("block", "gpus"),
    [({"affinity": "pair", "exclusion": "mine"}, ["fits", "its affinity group pair is on other GPUs"]), ({}, [])],
)
def test_labels_of_the_spec_and_of_annotations_count_alike(block: Json, gpus: list[str]) -> None:
    tenant = row("kept", (0,), 100, 1, labels={"exclusion": "mine", "affinity": "pair"})
    kubectl = cluster()
    kubectl.objects["/apis/sharepod.dev/v1alpha1/gpunodes"] = {"items": [gpunode("n", {0: 0, 1: 1}, [tenant])]}
    large = kubectl.objects["/apis/sharepod.dev/v1alpha1/namespaces/team/sharepods/large"]
    large["spec"]["gpu"] |= block
    claim = {"name": "c", "annotations": {f"sharepod.dev/gpu-{name}": label for name, label in block.items()}}
    asked = {"timeMilli": "100", "memory": "1Gi"}
    requests = [{"name": "gpu", "exactly": {"capacity": {"requests": asked}}}]
    spec = {"devices": {"requests": requests}}
    kubectl.objects["/apis/resource.k8s.io/v1/namespaces/team/resourceclaims/c"] = {"metadata": claim, "spec": spec}
    kubectl.objects["/api/v1/namespaces/team/events"] = {"items": []}
    for kind, name in (("sharepod", "large"), ("claim", "c")):
        [answer] = why(kubectl, TEAM, kind, name).items()
        wanted = gpus or ["an exclusion label keeps it", "fits"]
        assert [one["why"] or "fits" for one in answer["gpus"]] == wanted


def test_advice_that_the_operator_has_checked_is_the_only_one() -> None:
    kubectl = cluster()
    large = kubectl.objects["/apis/sharepod.dev/v1alpha1/namespaces/team/sharepods/large"]
    [answer] = why(kubectl, TEAM, "sharepod", "large").items()
    assert answer["smallest_change"] == "request 0.4 (node node-a)"
    assert answer["reasons"] == ["Placed: NoRoom: no GPU has 0.9 of its time free"]
    large["status"]["conditions"][0]["message"] = "0/2 nodes can take it. spec.gpu.request 0.3 would fit now."
    assert "Smallest change" not in printed(why(kubectl, TEAM, "sharepod", "large"))


def test_what_has_ended_or_requests_no_gpu_waits_for_none() -> None:
    kubectl = cluster()
    train = kubectl.objects["/apis/sharepod.dev/v1alpha1/namespaces/team/sharepods/train"]
    ready = {"type": "PodReady", "status": "False", "reason": "Completed", "message": "exit code 0"}
    train["status"] |= {"endTime": "2026-01-01T00:00:00Z", "conditions": [*train["status"]["conditions"], ready]}
    page = why(kubectl, TEAM, "sharepod", "train")
    assert (printed(page), page.status) == ("sharepod/train has ended: Completed: exit code 0", 1)
    kubectl.objects["/api/v1/namespaces/team/events"] = {"items": []}
    pod: Json = {"metadata": {"name": "web"}, "spec": {"nodeName": "n", "containers": [{"name": "main"}]}}
    kubectl.objects["/api/v1/namespaces/team/pods/web"] = pod
    assert printed(why(kubectl, TEAM, "pod", "web")) == "pod/web requests no share of a GPU"
    pod["metadata"]["ownerReferences"] = [{"apiVersion": "sharepod.dev/v1alpha1", "kind": "SharePod"}]
    assert printed(why(kubectl, TEAM, "pod", "web")) == "pod/web has its share"


def test_init_containers_and_sidecars_count_as_the_effective_request() -> None:
    def container(milli: int, **more: Any) -> Json:
        return {"resources": {"limits": {"sharepod.dev/gpu-milli": str(milli)}}} | more

    kubectl = cluster()
    kubectl.objects["/api/v1/namespaces/team/events"] = {"items": []}
    spec: Json = {"containers": [container(200)], "initContainers": [container(100, restartPolicy="Always")]}
    kubectl.objects["/api/v1/namespaces/team/pods/one"] = {"metadata": {"name": "one"}, "spec": spec}
    for init, effective in ((150, 300), (250, 350)):
        spec["initContainers"] = [spec["initContainers"][0], container(init)]
        [answer] = why(kubectl, TEAM, "pod", "one").items()
        assert answer["wanted"]["request_milli"] == effective


def test_odd_objects_cost_no_other_object_its_line() -> None:
    odd: list[Any] = [
        {},
        {"spec": {"tenants": [{"gpus": 5}]}},
        {"metadata": {"name": 7}, "spec": [], "status": {"gpus": "no", "tenants": [3, {"id": {}}]}},
    ]
    hostile = gpunode("node-c", {0: 0}, [row("evil\x1b[2J\r", (0,), 100, 1)])
    found = fleet([*odd, hostile])
    assert [gpu.node for gpu in found.gpus] == ["node-c"]
    assert "\x1b" not in found.workloads[0].name


def test_resize_patches_the_share_and_prints_the_operators_answer() -> None:
    kubectl = cluster()
    page = resize(kubectl, TEAM, "sharepod", "train", request="0.6", limit=None, memory="8Gi")
    assert kubectl.patches == [
        ("sharepods.sharepod.dev", TEAM, "train", {"spec": {"gpu": {"request": 0.6, "memory": "8Gi"}}})
    ]
    assert page.status == 0
    kubectl.objects["/apis/resource.k8s.io/v1/namespaces/team/resourceclaims/eval"] = {"metadata": {"name": "eval"}}
    page = resize(kubectl, TEAM, "claim", "eval", request="0.2", limit=None, memory=None)
    assert printed(page) == "claim/eval has no share yet; it waits for one with request 0.2"
    assert kubectl.patches[-1][3] == {"metadata": {"annotations": {"sharepod.dev/gpu-request": "0.2"}}}
    for written in ("400m", "40%", "0.40"):
        resize(kubectl, TEAM, "sharepod", "train", request=written, limit=None, memory=None)
        assert kubectl.patches[-1][3] == {"spec": {"gpu": {"request": 0.4}}}
    for change in ({"request": "2"}, {"request": "m"}, {"request": "110%"}, {"request": "nan"}, {"request": None}):
        with pytest.raises(KubectlError):
            resize(kubectl, TEAM, "sharepod", "train", limit=None, memory=None, **change)


def test_resize_waits_for_the_operators_answer() -> None:
    kubectl = cluster()
    item = kubectl.objects["/apis/sharepod.dev/v1alpha1/namespaces/team/sharepods/train"]
    resized = {"type": "Resized", "status": "Unknown", "reason": "Waiting"}
    item["status"]["conditions"].append(resized)

    def answer(_s: float) -> None:
        resized.update(status="True", reason="Granted")

    page = resize(kubectl, TEAM, "sharepod", "train", request=None, limit=None, memory="8Gi", pause=answer)
    assert (page.status, page.before) == (0, ["sharepod/train: request 0.5, limit 1, memory 8Gi"])


def refused(kubectl: Memory, *, then: dict[str, Any] | None = None, **change: str) -> Page:
    """Return the page of a refused `resize` of train. `then`: fields of `spec.gpu` that another user changes next."""
    item = kubectl.objects["/apis/sharepod.dev/v1alpha1/namespaces/team/sharepods/train"]
    resized = {"type": "Resized", "status": "Unknown", "reason": "Waiting"}
    item["status"]["conditions"] = [resized]

    def answer(_s: float) -> None:
        item["spec"]["gpu"].update(kubectl.patches[-1][3]["spec"]["gpu"], **(then or {}))
        resized.update(status="False", reason="NeverFits", message="keeps memory 8Gi")

    words: dict[str, Any] = {"request": None, "limit": None, "memory": None} | change
    return resize(kubectl, TEAM, "sharepod", "train", pause=answer, **words)


def test_a_refused_resize_leaves_the_spec_as_it_was() -> None:
    kubectl = cluster()
    spec = kubectl.objects["/apis/sharepod.dev/v1alpha1/namespaces/team/sharepods/train"]["spec"]
    del spec["gpu"]["limit"]
    before = dict(spec["gpu"])
    page = refused(kubectl, memory="1Ti", limit="0.9")
    assert page.before == ["sharepod/train keeps its share; the spec is as before: keeps memory 8Gi"]
    assert (page.status, spec["gpu"]) == (1, before)


def test_a_refused_resize_keeps_what_another_user_has_changed_since() -> None:
    kubectl = cluster()
    spec = kubectl.objects["/apis/sharepod.dev/v1alpha1/namespaces/team/sharepods/train"]["spec"]
    page = refused(kubectl, memory="1Ti", then={"memory": "16Gi"})
    assert (page.status, spec["gpu"]["memory"]) == (1, "16Gi")
    assert "the spec stays, because it has changed again" in printed(page)
    page = refused(kubectl, memory="1Ti", then={"request": 0.3})
    assert (spec["gpu"]["memory"], spec["gpu"]["request"]) == ("16Gi", 0.3), "only the changed fields are put back"


def test_a_change_that_makes_the_request_invalid_is_an_error() -> None:
    kubectl = cluster()
    large = kubectl.objects["/apis/sharepod.dev/v1alpha1/namespaces/team/sharepods/large"]
    message = "spec.gpu.memory: is required with request 0"
    large["status"]["conditions"] = [{"type": "Placed", "status": "False", "reason": "Invalid", "message": message}]
    page = resize(kubectl, TEAM, "sharepod", "large", request="0", limit=None, memory=None)
    assert (printed(page), page.status) == (f"sharepod/large cannot be placed: {message}", 1)


def test_formats_for_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    status, out = ran(cluster(), "gpus", "-o", "json", monkeypatch=monkeypatch)
    assert (status, json.loads(out)["items"][0]["free_milli"]) == (0, 300)
    status, out = ran(cluster(), "top", "-o", "name", monkeypatch=monkeypatch)
    assert out.split() == ["sharepod/large", "pod/notebook", "sharepod/train", "claim/eval"]
    status, out = ran(cluster(), "free", "-o", "yaml", monkeypatch=monkeypatch)
    assert f"model: {MODEL}" in out


def test_exit_statuses(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert ran(cluster(), "doctor", monkeypatch=monkeypatch)[0] == 1
    assert ran(cluster(), "why", "large", monkeypatch=monkeypatch)[0] == 1
    assert ran(cluster(), "explain", "NoRom", monkeypatch=monkeypatch)[0] == 2
    assert "did you mean NoRoom" in capsys.readouterr().err
    denied = cluster(denied=("/apis/sharepod.dev/v1alpha1/gpunodes",))
    assert ran(denied, "gpus", monkeypatch=monkeypatch)[0] == 3
    with pytest.raises(SystemExit) as wrong:
        ran(cluster(), "resize", monkeypatch=monkeypatch)
    assert wrong.value.code == 2
    for month in ("2026-13", "november", ""):
        with pytest.raises(SystemExit) as wrong:
            ran(cluster(), "bill", "--month", month, monkeypatch=monkeypatch)
        assert wrong.value.code == 2
        assert "write one such as 2026-11" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ("why", "a/b/c"),
        ("why", "pod/a/b"),
        ("why", "deployment/web"),
        ("why", ""),
        ("why", "pod/"),
        ("logs", ""),
        ("exec", "claim/eval", "--", "sh"),
        ("resize", "train"),
        ("resize", "train", "--request", "0,4"),
        ("resize", "train", "--request", "1e-9"),
        ("resize", "claim/eval", "--limit", "0.4"),
        ("explain", "nope"),
        ("top", "--watch", "-o", "json"),
    ],
)
def test_wrong_arguments_have_their_own_status(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    assert ran(cluster(), *words, monkeypatch=monkeypatch)[0] == 2


@pytest.mark.parametrize("place", ["", "GPU", "GPU-", "g"])
def test_the_beginning_of_every_uuid_names_no_gpu(place: str) -> None:
    (only,) = fleet([gpunode("node-a", {0: 0}, [])]).gpus
    with pytest.raises(KubectlError, match="write NODE:INDEX or a UUID"):
        commands.find([only], place)
    assert commands.find([only], UUIDS[0][:5]) is only
    with pytest.raises(KubectlError, match="2 GPUs begin with GPU-0; write more of the UUID"):
        commands.find([only, replace(only, uuid=UUIDS[0][:-1] + "9")], UUIDS[0][:5])


def test_why_of_a_sharepod_without_an_answer_names_the_operator() -> None:
    kubectl = cluster()
    item = kubectl.objects["/apis/sharepod.dev/v1alpha1/namespaces/team/sharepods/large"]
    assert "The operator has not answered" not in printed(why(kubectl, TEAM, "sharepod", "large"))
    kubectl.objects["/apis/sharepod.dev/v1alpha1/namespaces/team/sharepods/large"] = item | {"status": {}}
    assert "The operator has not answered yet" in printed(why(kubectl, TEAM, "sharepod", "large"))


def test_why_without_the_crds_says_that_sharepod_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    kubectl = cluster()

    def get(_self: Kubectl, _path: str) -> Json:
        raise NotFoundError(f"Error from server (NotFound): the server {UNKNOWN_KIND}")

    monkeypatch.setattr(type(kubectl), "get", get)
    with pytest.raises(KubectlError, match="SharePod is not installed"):
        why(kubectl, TEAM, "sharepod", "large")


def test_a_missing_sharepod_is_sought_among_pods_and_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotFoundError, match="for a Pod write pod/notebook, for a claim claim/notebook"):
        why(cluster(), TEAM, "sharepod", "notebook")
    became: list[list[str]] = []

    def become(_self: Kubectl, given: list[str]) -> None:
        became.append(given)
        sys.exit(0)

    monkeypatch.setattr(Kubectl, "become", become)
    with pytest.raises(SystemExit):
        ran(cluster(), "logs", "pod/notebook", "-f", monkeypatch=monkeypatch)
    assert became == [["logs", "--namespace", TEAM, "notebook", "-f"]]


@pytest.mark.parametrize(
    ("words", "flags", "passed"),
    [
        (("-n", "other", "-f"), (), ["--namespace", "other", "train", "-f"]),
        (
            ("--tail=5", "--namespace=other", "-c", "main"),
            (),
            ["--namespace", "other", "train", "--tail=5", "-c", "main"],
        ),
        (("--as", "dana", "--since", "5m"), ("--as=dana",), ["--namespace", TEAM, "train", "--since", "5m"]),
        (("--", "sh", "-n", "x"), (), ["--namespace", TEAM, "train", "--", "sh", "-n", "x"]),
        (
            ("--as=dana", "--as-group", "a", "--as-group=b", "--insecure-skip-tls-verify"),
            ("--as=dana", "--as-group=a", "--as-group=b", "--insecure-skip-tls-verify"),
            ["--namespace", TEAM, "train"],
        ),
    ],
)
def test_namespace_and_connection_count_after_the_name_too(
    words: tuple[str, ...], flags: tuple[str, ...], passed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kubectl = cluster()
    train = kubectl.objects["/apis/sharepod.dev/v1alpha1/namespaces/team/sharepods/train"]
    kubectl.objects["/apis/sharepod.dev/v1alpha1/namespaces/other/sharepods/train"] = train
    became: list[list[str]] = []
    used: list[tuple[str, ...]] = []

    def become(_self: Kubectl, given: list[str]) -> None:
        became.append(given)
        sys.exit(0)

    def connected(given: tuple[str, ...], _program: str) -> Kubectl:
        used.append(given)
        return kubectl

    monkeypatch.setattr(Kubectl, "become", become)
    monkeypatch.setattr(program, "Kubectl", connected)
    with pytest.raises(SystemExit):
        program.run(["logs", "train", *words])
    assert (became, used) == ([["logs", *passed]], [flags])


def test_missing_rights_are_named_with_what_is_left() -> None:
    kubectl = cluster(denied=("/apis/sharepod.dev/v1alpha1/gpu", "/api/v1/namespaces/team/events"))
    with pytest.raises(ForbiddenError, match="`kubectl sharepod budget` shows the budgets of your namespace"):
        commands.bill(Scope(kubectl, TEAM), None)
    with pytest.raises(ForbiddenError, match="`kubectl sharepod free` shows free shares"):
        commands.all_gpus(Scope(kubectl, None))
    waiting: Json = {"metadata": {"name": "web"}, "spec": {"resourceClaims": [{"name": "gpu"}]}, "status": {}}
    kubectl.objects["/api/v1/namespaces/team/pods/web"] = waiting
    assert "You may not list Events" in printed(why(kubectl, TEAM, "pod", "web"))


def test_a_placed_sharepod_names_its_gpus() -> None:
    kubectl = cluster()
    train = kubectl.objects["/apis/sharepod.dev/v1alpha1/namespaces/team/sharepods/train"]
    train["status"]["conditions"][0]["message"] = "GPU 0 of node-a: request 0.5, limit 1, memory 8Gi"
    assert "its share: GPU 0 of node-a: request 0.5, limit 1" in printed(why(kubectl, TEAM, "sharepod", "train"))


def test_a_format_that_does_not_exist_is_answered_with_the_list(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        ran(cluster(), "gpus", "-o", "csv", monkeypatch=monkeypatch)
    assert "'table', 'wide', 'json', 'yaml', 'name'" in capsys.readouterr().err


def test_a_kubeconfig_without_a_context_is_answered_with_what_to_set(tmp_path: Path) -> None:
    script = tmp_path / "kubectl"
    script.write_text("#!/bin/sh\necho 'error: current-context must exist in order to minify' >&2\nexit 1\n")
    script.chmod(0o755)
    with (
        closing(Kubectl(program=str(script))) as kubectl,
        pytest.raises(KubectlError, match="set KUBECONFIG, or add --context"),
    ):
        kubectl.namespace()


def test_doctor_without_the_right_to_list_deployments_checks_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    page = doctor(cluster(denied=("/apis/apps/v1/deployments",)))
    assert "the agent does not renew its Lease" in printed(page, 400)
    assert page.notes == ["You may not list Deployments, so Deployments are not checked."]


def test_doctor_reports_a_cluster_without_an_operator() -> None:
    kubectl = cluster()
    assert "no Deployment sharepod-operator" not in printed(doctor(kubectl), 400)
    kubectl.objects["/apis/apps/v1/deployments"] = {"items": []}
    assert "no Deployment sharepod-operator: apply SharePod's manifests" in printed(doctor(kubectl), 400)


def test_output_that_cannot_be_written_is_an_error_without_a_traceback() -> None:
    command = [sys.executable, "-m", "kubectl_sharepod", "explain"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False, cwd=CLI)
    assert (done.returncode, done.stderr) == (1, "error: cannot write the output: No space left on device\n")


def test_a_reader_that_ends_causes_no_message() -> None:
    command = f"{sys.executable} -m kubectl_sharepod explain | true"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60, check=False, cwd=CLI)
    assert done.stderr == ""


def test_names_beyond_the_terminals_encoding_are_printed(tmp_path: Path) -> None:
    script = tmp_path / "kubectl"
    script.write_text("#!/bin/sh\necho 'error: no context ü' >&2\nexit 1\n")
    script.chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "kubectl_sharepod", "top"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False, cwd=CLI)
    assert (done.returncode, done.stderr) == (1, "error: no context ?\n")


@pytest.mark.parametrize(("status", "reported"), [("True", True), ("False", False)])
def test_doctor_reports_a_device_plugin_that_could_assign_the_gpus(status: str, reported: bool) -> None:
    kubectl = cluster()
    node = kubectl.objects["/apis/sharepod.dev/v1alpha1/gpunodes"]["items"][0]
    node["status"]["conditions"] = [{"type": "DevicePluginPresent", "status": status, "message": "the Node advertises"}]
    assert ("DevicePluginPresent: the Node advertises" in printed(doctor(kubectl), 400)) is reported


def test_logs_exec_and_port_forward_go_to_the_sharepods_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    became: list[list[str]] = []

    def become(_self: Kubectl, words: list[str]) -> None:
        became.append(words)
        raise KubectlError("this process is kubectl now")

    monkeypatch.setattr(Kubectl, "become", become)
    ran(cluster(), "exec", "train", "--", "sh", "-c", "id", monkeypatch=monkeypatch)
    assert became == [["exec", "--namespace", TEAM, "train", "--", "sh", "-c", "id"]]


def test_each_command_has_help_with_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("top", "free", "gpus", "who", "why", "bill", "budget", "resize", "logs", "explain", "doctor"):
        with pytest.raises(SystemExit):
            program.run([name, "--help"])
        assert f"example: kubectl sharepod {name}" in capsys.readouterr().out


def test_completions_are_commands_places_reasons_and_names() -> None:
    assert completions(["to"], cluster()) == ["top"]
    assert completions(["who", "node-a"], cluster()) == ["node-a:0", "node-a:1"]
    assert completions(["explain", "NoRo"], cluster()) == ["NoRoom"]
    assert completions(["why", ""], cluster()) == ["train", "large"]
    assert "--all-namespaces" in completions(["top", "--"], cluster())
    kubectl = cluster()
    other = kubectl.objects["/apis/sharepod.dev/v1alpha1/namespaces/team/sharepods"]["items"][:1]
    kubectl.objects["/apis/sharepod.dev/v1alpha1/namespaces/other/sharepods"] = {"items": other}
    for namespace in (["-n", "other"], ["--namespace=other"], ["--namespace", "other"]):
        assert completions(["logs", *namespace, ""], kubectl) == ["train"]


def test_completions_are_read_over_the_connection_that_the_words_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    used: list[tuple[str, ...]] = []

    def connected(flags: tuple[str, ...]) -> Kubectl:
        used.append(flags)
        return cluster()

    monkeypatch.setattr(completion, "Kubectl", connected)
    for words in (["--context=lab", "who", "node-b"], ["who", "--context", ""]):
        monkeypatch.setattr(sys, "argv", ["kubectl_complete-sharepod", *words])
        completion.main()
    assert (used, capsys.readouterr().out) == ([("--context=lab",)], "node-b:0\n:4\n:4\n")


def test_the_list_of_reasons_is_the_references() -> None:
    assert generate.REASONS.read_text(encoding="utf-8") == generate.reasons_file(), "run make docs"
    assert {"NoRoom", "Overtaken", "NotRegistered"} <= commands.reasons().keys()


def test_a_target_is_a_name_or_a_kind_and_a_name() -> None:
    assert [target(text) for text in ("a", "pod/a", "claim/a", "shp/a")] == [
        ("sharepod", "a"),
        ("pod", "a"),
        ("claim", "a"),
        ("sharepod", "a"),
    ]
    with pytest.raises(KubectlError, match="pod/NAME or claim/NAME"):
        target("job/a")
