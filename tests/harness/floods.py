"""Programs that attack the agent through a tenant's socket: endless frames, garbage, thousands of connections, and
hundreds of connections next to a pending request for all memory, which makes each of their frames expensive.

`command(how)` runs in the tenant's directory; it prints "begins" and continues until it is killed.
"""

from __future__ import annotations

import sys

_PROGRAM = """
import itertools, socket, struct, sys
from sharepod import protocol

def connect():
    s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    s.connect("agent.sock")
    return s

def greeted():
    s = connect()
    s.send(protocol.encode(protocol.Hello(1, 1)))
    s.recv(2000)
    return s

def frames():
    s, frame = greeted(), protocol.encode(protocol.Want(1))
    while True:
        s.send(frame)

def questions():
    s, frame = greeted(), protocol.encode(protocol.MemInfo(1, 0))
    while True:
        s.send(frame)

def garbage():
    while True:
        s = connect()
        s.send(b"\\xff" * 700)
        s.close()

def connects():
    while True:
        connect().close()

def mute():
    kept = [connect() for _ in range(200)]
    while True:
        connect().close()

def stolen():
    s = greeted()
    while True:
        socket.send_fds(s, [protocol.encode(protocol.MemInfo(1, 0))], [0, 1, 2])
        s.recv(2000)

def crowd():
    kept = []
    for _ in range(400):
        s = greeted()
        s.send(protocol.encode(protocol.Reserve(1, 0, 4096)))
        s.setblocking(False)
        kept.append(s)
    more = protocol.encode(protocol.Reserve(2, 0, (4 << 30) - 4096))
    nothing = protocol.encode(protocol.Release(0, 1))
    kept[0].setblocking(True)
    while True:
        kept[0].send(more)
        for s in kept[1:]:
            try:
                for _ in range(8):
                    s.send(nothing)
                s.recv(2000)
            except BlockingIOError:
                pass
        while not isinstance(protocol.parse_agent(kept[0].recv(2000)), protocol.Reserved):
            pass

print("begins", flush=True)
while True:
    try:
        globals()[sys.argv[1]]()
    except OSError:
        pass
"""

KINDS = ("frames", "questions", "garbage", "connects", "mute", "stolen", "crowd")


def command(how: str) -> list[str]:
    """Return the command line of one of the programs in KINDS."""
    assert how in KINDS, how
    return [sys.executable, "-c", _PROGRAM, how]
