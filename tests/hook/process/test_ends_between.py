"""Steps of other threads during a call that ends a context: no handle of an ended context reaches the driver.

The double calls a thread of the program at a moment that the test names, so that the result does not depend on speed.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
from hook.conftest import GPU_0, Tenant
from hook.world.child import end
from hook.world.driver_script import PRELUDE
from sharepod.protocol import Drained, Grant, Want

pytestmark = pytest.mark.promise("program-ends")

BETWEEN = """
import threading
kept = []

def at(moment, function):
    "Have the function called once, at the next such moment."
    def once():
        cuda.fake_at(moment, None)
        function()
    kept.append(ctypes.CFUNCTYPE(None)(once))
    assert cuda.fake_at(moment, kept[-1]) == 0

def in_thread(function):
    "Start it in a thread, which ends with the process at the latest."
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread

def load(kernel):
    return new("cuModuleGetFunction", new("cuModuleLoadData", b"x"), kernel)

def launch(function, stream=None):
    return call("cuLaunchKernel", function, *[c_uint(1)] * 6, c_uint(0), stream, None, None)

def ends(how):
    "End the context."
    if how == "destroy":
        return call("cuCtxDestroy_v2", context)
    return call("cuDevicePrimaryCtxReset_v2" if how == "reset" else "cuDevicePrimaryCtxRelease_v2", 0)

def pause(word):
    "Report this point to the test, and wait for its answer."
    print(word, flush=True)
    sys.stdin.readline()

how = os.environ["HOW"]
if how == "destroy":
    context = new("cuCtxCreate_v2", c_uint(0), 0)
    stream = new("cuStreamCreate", 1)
"""


class Script:
    """Script in a process of its own, which pauses at named points."""

    def __init__(self, tenant: Tenant, script: str, how: str) -> None:
        self._tenant = tenant
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-c", PRELUDE + BETWEEN + script],
            env=tenant.environment("ends", HOW=how),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def until(self, word: str) -> None:
        """Wait until the script pauses at this point."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line == f"{word}\n", line + self._process.stdout.read()

    def goes_on(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def over(self) -> None:
        """Wait for the end of the script. AssertionError with its output if it fails."""
        output, _ = self._process.communicate(timeout=60)
        assert (self._process.returncode, output) == (0, "")

    def misused(self) -> int:
        """Return the number of driver calls with a handle of an ended context."""
        return self._tenant.read().client("ends").usage[GPU_0].misused

    def close(self) -> None:
        end(self._process)


class Scripts:
    """Starts scripts. Each script ends with the test."""

    def __init__(self, tenant: Tenant) -> None:
        self._tenant = tenant
        self._started: list[Script] = []

    def __call__(self, script: str, how: str) -> Script:
        self._started.append(Script(self._tenant, script, how))
        return self._started[-1]

    def close(self) -> None:
        for script in self._started:
            script.close()


@pytest.fixture
def scripts(tenant: Tenant) -> Iterator[Scripts]:
    started = Scripts(tenant)
    yield started
    started.close()


LAUNCHED_BEFORE = """
launched, gone, returned = threading.Event(), threading.Event(), threading.Event()

def launches():
    ok("cuCtxSetCurrent", context)
    function = load(b"noop")
    at(b"launched", lambda: (launched.set(), gone.wait()))
    assert launch(function, stream) == 0
    returned.set()

in_thread(launches)
launched.wait()
at(b"ended", lambda: (gone.set(), returned.wait()))
assert ends(how) == 0
assert returned.is_set()
"""


@pytest.mark.parametrize("how", ["destroy", "reset", "release"])
def test_a_launch_that_returns_when_its_context_is_gone_is_not_fenced(
    tenant: Tenant, scripts: Scripts, how: str
) -> None:
    """The launching thread is in the driver while another thread ends the context. The launch returns before the call
    that ends the context.
    """
    agent = tenant.agent()
    agent.on_want = lambda client: agent.next_grant(metered=True)
    script = scripts(LAUNCHED_BEFORE, how)
    script.over()
    assert script.misused() == 0


GONE_BEFORE = """
assert ends(how) == 0
ok("cuCtxSetCurrent", None)
"""
RETAINED_BEFORE = """
def retains():
    again = new("cuDevicePrimaryCtxRetain", 0)
    assert again.value == context.value, "it has not ended yet"
    ok("cuCtxSetCurrent", again)
    assert launch(load(b"noop")) == 0

def waits():
    ok("cuCtxSetCurrent", other)
    launch(function)

other = new("cuCtxCreate_v2", c_uint(0), 0)
function = load(b"noop")
at(b"ending", lambda: in_thread(retains).join())
at(b"ended", lambda: (pause("ended"), in_thread(waits), pause("waits")))
assert ends(how) == 0
pause("over")
"""


@pytest.mark.parametrize("there", [True, False], ids=["there", "gone"])
def test_work_of_a_reference_that_was_taken_while_the_context_ended_ends_with_it(
    tenant: Tenant, scripts: Scripts, there: bool
) -> None:
    """One thread resets the primary context. During that call another thread retains the context and launches, and the
    reset then ends it.

    Until the reset has returned, the hook cannot know whether the launch is in the ended context or in a new one. So it
    must neither use the context's handle nor report the launch as drained. The same holds if there was no context when
    the reset began (`there` is False).
    """
    agent = tenant.agent(grace_ms=100)
    grants: list[Grant] = []

    def again(_client: object) -> Grant:
        grants.append(agent.next_grant(metered=True))
        return grants[-1]

    agent.on_want = again
    script = scripts(RETAINED_BEFORE if there else GONE_BEFORE + RETAINED_BEFORE, "reset")
    script.until("ended")
    agent.on_want = lambda _client: None
    client = agent.client()
    wants = len(agent.frames(client, Want))
    drained = len(agent.frames(client, Drained))
    agent.revoke(client, grants[-1])
    script.goes_on()
    script.until("waits")
    agent.wait(
        lambda: len(agent.frames(client, Want)) > wants or len(agent.frames(client, Drained)) > drained,
        "the drain to be overdue",
    )
    assert script.misused() == 0
    assert len(agent.frames(client, Drained)) == drained, "which context the work is in is not known"
    agent.on_want = again
    script.goes_on()
    script.until("over")
    agent.next_frame(client, Drained, drained)
    script.goes_on()
    script.over()
    assert script.misused() == 0


RETAINED_AFTER = """
MIB8 = 8 * MIB
taken = alloc(MIB8)
first = load(b"noop")
for _ in range(8):
    assert launch(first, stream) == 0 and launch(first) == 0

def retains():
    global second, again
    again = new("cuDevicePrimaryCtxRetain", 0)
    ok("cuCtxSetCurrent", again)
    second = load(b"noop")
    assert launch(second) == 0

at(b"ended", lambda: in_thread(retains).join())
assert ends(how) == 0
ok("cuCtxSetCurrent", again)
for _ in range(8):
    assert launch(second) == 0
ok("cuCtxSynchronize")
pause("reborn")
"""


@pytest.mark.parametrize("how", ["reset", "release"])
def test_a_context_that_is_made_again_before_its_release_has_returned_is_another(
    tenant: Tenant, scripts: Scripts, how: str
) -> None:
    """The driver reports an active primary context, but it is a second one. The hook must treat all objects of the
    first context as ended, and return its memory."""
    agent = tenant.agent()
    agent.on_want = lambda client: agent.next_grant(metered=True)
    script = scripts(RETAINED_AFTER, how)
    script.until("reborn")
    assert script.misused() == 0
    tenant.until(lambda: agent.used(0) < 8 << 20, "the memory of the first one to be given back")
    script.goes_on()
    script.over()


GOES_ON = """
function = load(b"noop")
before = cuda.fake_live_events()
for _ in range(8):
    assert launch(function, stream) == 0
events = cuda.fake_live_events()
assert events > before, "they were fenced"
for _ in range(3):
    at(b"ending", lambda: in_thread(lambda: new("cuDevicePrimaryCtxRetain", 0)).join())
    assert ends(how) == 0
    for _ in range(8):
        assert launch(function, stream) == 0
assert cuda.fake_live_events() == events, "they have the fences of before"
"""


def test_a_context_that_is_retained_before_its_last_release_goes_on(tenant: Tenant, scripts: Scripts) -> None:
    """During the last release another thread retains the context. So the release does not end it, and its streams and
    events stay valid.
    """
    agent = tenant.agent()
    agent.on_want = lambda client: agent.next_grant(metered=True)
    script = scripts(GOES_ON, "release")
    script.over()
    assert script.misused() == 0


REFUSED = """
memory = alloc(MIB)
function = load(b"noop")
assert launch(function) == 0

def works():
    ok("cuCtxSetCurrent", context)
    current.set()
    gone.wait()
    assert call("cuMemsetD8_v2", memory, ctypes.c_ubyte(0), 64) != 0
    assert call("cuMemsetD8Async", memory, ctypes.c_ubyte(0), 64, None) != 0
    assert call("cuMemcpyDtoDAsync_v2", memory, memory + 4096, 64, None) != 0
    assert launch(function) != 0

current, gone = threading.Event(), threading.Event()
thread = in_thread(works)
current.wait()
assert ends(how) == 0
gone.set()
thread.join()
"""


@pytest.mark.parametrize("how", ["destroy", "reset"])
def test_work_that_the_driver_refuses_since_the_context_is_gone_is_not_fenced(
    tenant: Tenant, scripts: Scripts, how: str
) -> None:
    """The ended context is still current in a thread. The driver refuses that thread's launch, memset and copy, so no
    event may follow them.
    """
    agent = tenant.agent()
    agent.on_want = lambda client: agent.next_grant(metered=True)
    script = scripts(REFUSED, how)
    script.over()
    assert script.misused() == 0


REFERENCES = """
import random

def lives(seed):
    chance = random.Random(seed)
    for _ in range(30):
        mine = new("cuDevicePrimaryCtxRetain", 0)
        ok("cuCtxSetCurrent", mine)
        function = load(b"spin_us_50")
        stream = new("cuStreamCreate", 1) if chance.random() < .5 else None
        alloc(MIB)
        for _ in range(chance.randrange(6)):
            assert launch(function, stream) == 0
        if chance.random() < .5:
            ok("cuCtxSynchronize")
        ok("cuCtxSetCurrent", None)
        ok("cuDevicePrimaryCtxRelease_v2", 0)

ok("cuCtxSetCurrent", None)
assert ends(how) == 0
threads = [in_thread(lambda seed=seed: lives(seed)) for seed in range(4)]
for thread in threads:
    thread.join()
pause("still")
"""


def test_threads_that_take_and_give_back_references_each_on_its_own(tenant: Tenant, scripts: Scripts) -> None:
    """The primary context ends and is created again while other threads are about to use it or have just used it."""
    agent = tenant.agent()
    agent.on_want = lambda client: agent.next_grant(7, metered=True)
    script = scripts(REFERENCES, "release")
    script.until("still")
    assert script.misused() == 0
    tenant.until(lambda: agent.used(0) == 0, "all memory to be given back")
    script.goes_on()
    script.over()
