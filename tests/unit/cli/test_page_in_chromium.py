"""Page of the fleet in headless Chromium: hostile names, 1,000 GPUs, keyboard, screen reader, colours and widths.

Without Chromium these tests are skipped.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import pytest
from harness.cluster import wait_until
from kubectl_sharepod.kubectl import Json
from kubectl_sharepod.page.server import Reading, served
from kubectl_sharepod.reading import Scope

from .chromium import MISSING, PROGRAM, Browser, chromium
from .fleet import GI, Memory, cluster, gpunode, row, sharepod

pytestmark = [pytest.mark.skipif(PROGRAM is None, reason=MISSING), pytest.mark.promise("operator-page")]

NODES, PODS = "/apis/sharepod.dev/v1alpha1/gpunodes", "/apis/sharepod.dev/v1alpha1/sharepods"
HOSTILE = (
    "<img src=x onerror=hacked=1>",
    "</script><script>hacked=1</script>",
    '"><svg onload=hacked=1>',
    "javascript:hacked=1",
    "__proto__",
    "${hacked=1}\u202e\x1b[2J",
)
"""Names and messages that would run or draw something if the page treated them as markup or code."""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("chromium")) as opened:
        yield opened


@pytest.fixture
def shown(browser: Browser) -> Iterator[Any]:
    """Return a function that opens the page of a cluster."""
    with ExitStack() as servers:

        def open_page(kubectl: Memory, namespace: str | None = None, width: int = 1280, scheme: str = "light") -> None:
            reading = Reading(Scope(kubectl, namespace))
            reading.read()
            url = servers.enter_context(served(lambda: reading.body))
            browser.size(width, 800, scheme)
            browser.events.clear()
            browser.open(url)

        yield open_page
        outside = {
            event["params"]["request"]["url"]
            for event in browser.events
            if event["method"] == "Network.requestWillBeSent" and "127.0.0.1" not in event["params"]["request"]["url"]
        }
        wrong = [event for event in browser.events if event["method"] in ("Log.entryAdded", "Runtime.exceptionThrown")]
        browser.call("Page.navigate", url="about:blank")
        assert (outside, wrong) == (set(), []), "no request to elsewhere, no error, nothing refused by the policy"


def drawn(browser: Browser, kubectl: Memory) -> None:
    """Read the cluster again, and wait until the page has drawn it."""
    reading = Reading(Scope(kubectl, None))
    reading.read()
    found = json.loads(reading.body)
    browser.js(f"drawAll({json.dumps(found)})")


def of(gpunodes: list[Json], sharepods: Sequence[Json] = ()) -> Memory:
    """Return a cluster with these GPUNodes and SharePods only."""
    none: Json = {"items": []}
    lists = {NODES: {"items": gpunodes}, PODS: {"items": list(sharepods)}}
    return Memory(objects=lists | {"/api/v1/nodes": none, "/api/v1/pods": none})


def hostile() -> Memory:
    """Return a cluster in which every text that a user or an agent can write is hostile."""
    rows = [row(name, (0,), 100, 4, namespace=other) for name, other in zip(HOSTILE, reversed(HOSTILE), strict=True)]
    node = gpunode(
        HOSTILE[0], {0: 0}, rows, conditions=[{"type": "AgentAlive", "status": "False", "message": HOSTILE[1]}]
    )
    node["status"]["gpus"][0]["model"] = HOSTILE[2]
    waiting = []
    for number, text in enumerate(HOSTILE):
        pod = sharepod(text, 0.5, placed=False)
        pod["metadata"]["uid"] = f"waits-{number}"
        pod["status"]["conditions"][0]["message"] = text
        waiting.append(pod)
    return of([node], waiting)


def large(nodes: int = 125) -> Memory:
    """Return a cluster with 8 GPUs on each node and three tenants on each GPU."""
    items: list[Json] = []
    for number in range(nodes):
        uuids = [f"GPU-{number:04}-{index}" for index in range(8)]
        tenants = [
            row(f"t{number}-{index}-{nth}", (), 300, 20) | {"gpus": [uuid]}
            for index, uuid in enumerate(uuids)
            for nth in range(3)
        ]
        node = gpunode(f"node-{number:03}", {}, tenants)
        node["status"]["gpus"] = [
            {"uuid": uuid, "index": index, "model": "NVIDIA H100", "memory": 80 * GI}
            for index, uuid in enumerate(uuids)
        ]
        items.append(node)
    return of(items)


def test_hostile_names_are_shown_as_text_and_run_nothing(browser: Browser, shown: Any) -> None:
    shown(hostile())
    browser.js("document.querySelector('summary').click()")
    browser.until("document.querySelectorAll('details table').length === 1")
    assert browser.js("typeof hacked") == "undefined"
    kinds = browser.js("[...new Set([...document.querySelectorAll('main *')].map(each => each.localName))]")
    assert not {"img", "script", "iframe", "a"} & set(kinds)
    assert browser.js("document.querySelectorAll('svg').length") == 1
    seen = browser.js("document.body.textContent")
    for text in HOSTILE[:-1]:
        assert text in seen, text
    assert not [letter for letter in ("\u202e", "\x1b") if letter in seen], "control characters are blanks"
    assert browser.js("document.querySelectorAll('#waiting tr').length") == len(HOSTILE)


def test_1000_gpus_are_drawn_in_slices_and_a_refresh_changes_what_has_changed(browser: Browser, shown: Any) -> None:
    kubectl = large()
    shown(kubectl)
    assert browser.js("document.querySelectorAll('summary').length") == 1000
    assert browser.js("document.querySelectorAll('*').length") < 20_000, (
        "tables of tenants are made when a GPU is opened"
    )
    browser.js(
        "window.seen = new Set();"
        " new MutationObserver(all => all.forEach(one => seen.add(one.target.closest('details'))))"
        ".observe(document.getElementById('nodes'), {subtree: true, childList: true, characterData: true,"
        " attributeFilter: ['style', 'class', 'hidden', 'tabindex', 'aria-label']}), 0"
    )
    drawn(browser, kubectl)
    assert browser.js("seen.size") == 0, "equal content changes no element"
    kubectl.objects[NODES]["items"][3]["status"]["tenants"][0]["heldMilli"] = 777
    drawn(browser, kubectl)
    assert browser.js("seen.size") == 1
    assert "uses 0.777" in browser.js("[...seen][0].querySelector('[role=img]').ariaLabel")
    ticks = browser.js(
        "(async () => { gpus.clear(); nodes.clear(); order = ''; document.getElementById('nodes').replaceChildren();"
        " let ticks = 0, on = true; (function tick() { ticks += 1; if (on) setTimeout(tick); })();"
        " last.at = 0; await drawAll(await (await fetch('fleet.json')).json()); on = false; return ticks; })()"
    )
    assert ticks > 2, "the page answers to keys while it draws"


def test_gpus_come_and_go(browser: Browser, shown: Any) -> None:
    kubectl = large(2)
    shown(kubectl)
    items = kubectl.objects[NODES]["items"]
    first = items.pop(0)
    drawn(browser, kubectl)
    titles = "[...document.querySelectorAll('h3 span')].map(each => each.textContent)"
    assert (browser.js(titles), browser.js("gpus.size")) == (["node-001"], 8)
    items.insert(0, first)
    drawn(browser, kubectl)
    assert (browser.js(titles), browser.js("gpus.size")) == (["node-000", "node-001"], 16)


def test_a_gpu_that_two_gpunodes_report_is_drawn_twice(browser: Browser, shown: Any) -> None:
    """The GPUNode of a renamed node may outlive the node by some time."""
    kubectl = large(1)
    [node] = kubectl.objects[NODES]["items"]
    kubectl.objects[NODES]["items"].append(node | {"metadata": {"name": "renamed"}})
    shown(kubectl)
    drawn = "[...document.querySelectorAll('.node')].map(each => each.querySelectorAll('details').length)"
    assert browser.js(drawn) == [8, 8]


def focused(browser: Browser) -> str:
    return str(browser.js("document.activeElement.id || document.activeElement.textContent.slice(0, 5)"))


def test_every_part_is_reached_by_keyboard(browser: Browser, shown: Any) -> None:
    shown(large(2))
    order = []
    for _ in range(4):
        browser.press("Tab")
        order.append(focused(browser))
    assert order == ["Skip ", "words", "kind", "GPU 0"], "nothing waits, so its table is no stop"
    for key, place in (("ArrowDown", 1), ("End", 15), ("ArrowDown", 15), ("ArrowUp", 14), ("Home", 0)):
        browser.press(key)
        assert browser.js("[...document.querySelectorAll('summary')].indexOf(document.activeElement)") == place
    browser.press("Enter")
    browser.until("document.querySelector('details').open && document.querySelectorAll('details td').length > 0")
    browser.press("Tab")
    assert browser.js("document.activeElement.ariaLabel") == "Tenants of node-000:0"
    browser.press("Tab")
    assert browser.js("document.activeElement.localName") in ("body", "html"), "one GPU is a stop, not sixteen"
    assert browser.js("getComputedStyle(document.querySelector('summary:focus-visible') || document.body).outlineStyle")


def test_the_filter_hides_gpus_and_announces_how_many_are_left(browser: Browser, shown: Any) -> None:
    shown(cluster())
    for words, kind, left in (
        ("train", "", 1),
        ("", "out", 1),
        ("NODE-A a100", "", 2),
        ("zebra", "", 0),
        ("", "used", 2),
    ):
        browser.js(
            f"words.value = {json.dumps(words)}, kind.value = {json.dumps(kind)}, "
            "words.dispatchEvent(new Event('input'))"
        )
        assert browser.js("document.querySelectorAll('details:not([hidden])').length") == left
        assert browser.js("document.querySelector('[role=status]').textContent") == f"{left} of 3 GPUs"


def test_a_screen_reader_gets_names_and_roles(browser: Browser, shown: Any) -> None:
    shown(cluster())
    named: list[tuple[str, str]] = []
    tenants = "team/train requests 0.5, uses 0.22; team/notebook requests 0.2, uses 0.22"

    def has_bars() -> bool:
        named[:] = [
            (node["role"]["value"], node.get("name", {}).get("value", ""))
            for node in browser.call("Accessibility.getFullAXTree")["nodes"]
            if not node.get("ignored", False)
        ]
        return ("image", f"0.7 of its time requested, 0.44 used: {tenants}") in named

    wait_until(has_bars, what="the text of a GPU's bar", timeout=20)  # the page draws its GPUs after its heading
    bars = [name for role, name in named if role == "image"]
    assert any("0.66 used on average" in name for name in bars), "the curve has its figures as text"
    assert ("rowheader", "team/large") in named
    assert [name for role, name in named if role == "heading"][:5] == [
        "GPUs", "Waiting", "Last hour", "GPUs and their tenants", "node-a dedicated",
    ]  # fmt: skip
    assert ("searchbox", "Node, model, namespace or name") in named
    unnamed = [
        role for role, name in named if role in ("image", "region", "searchbox", "combobox", "button") and not name
    ]
    assert unnamed == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_colours_and_widths(browser: Browser, shown: Any, width: int, scheme: str) -> None:
    shown(cluster(), width=width, scheme=scheme)
    browser.js("document.querySelector('summary').click()")
    assert browser.js("document.documentElement.scrollWidth <= innerWidth"), "the page does not scroll sideways"
    back = browser.js("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
    assert (sum(back) < 3 * 128) == (scheme == "dark")
    low = browser.js(CONTRAST)
    assert low == [], "each text has a contrast of 4.5 to its background"


CONTRAST = """(() => {
  const light = text => text.match(/[\\d.]+/g).slice(0, 3).map(one => one / 255)
    .map(one => one <= .04045 ? one / 12.92 : ((one + .055) / 1.055) ** 2.4)
    .reduce((sum, one, number) => sum + one * [.2126, .7152, .0722][number], 0);
  const back = each => { for (; each; each = each.parentElement) {
    const found = getComputedStyle(each).backgroundColor;
    if (!found.endsWith(', 0)')) return found;
  } };
  return [...document.querySelectorAll('body *')]
    .filter(each => [...each.childNodes].some(child => child.nodeType === 3 && child.data.trim()) && each.offsetParent)
    .filter(each => { const one = light(getComputedStyle(each).color), other = light(back(each));
      return (Math.max(one, other) + .05) / (Math.min(one, other) + .05) < 4.5; })
    .map(each => each.outerHTML.slice(0, 80));
})()"""


def test_who_may_not_list_nodes_sees_the_own_sharepods(browser: Browser, shown: Any) -> None:
    shown(cluster(denied=(NODES, PODS)), "team")
    assert browser.js("document.getElementById('fleet').hidden")
    assert "train" in browser.js("document.getElementById('pods').textContent")
    assert "sharepod-gpunode-view" in browser.js("document.getElementById('notes').textContent")
    assert browser.js("document.querySelectorAll('#waiting tr').length") == 1


def test_a_page_whose_command_has_ended_shows_it(browser: Browser, shown: Any) -> None:
    shown(cluster())
    browser.js("window.fetch = () => Promise.reject(new Error('ended')), refresh()")
    browser.until("document.getElementById('problem').textContent.includes('has ended or does not answer; figures of')")
    assert browser.js("document.querySelectorAll('summary').length") == 3


def test_a_namespace_of_many_sharepods_is_drawn_as_its_first_ones(browser: Browser, shown: Any) -> None:
    kubectl = cluster(denied=(NODES,))
    kubectl.objects[f"{NODES.rpartition('/')[0]}/namespaces/team/sharepods"] = {
        "items": [sharepod(f"job-{number}", 0.1) for number in range(3000)]
    }
    shown(kubectl, "team")
    browser.until("document.querySelectorAll('#pods-table tbody tr').length === 200")
    assert "2800 more" in browser.js("document.getElementById('pods-more').textContent")
