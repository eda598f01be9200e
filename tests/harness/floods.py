"""Programs that trouble the agent through a tenant's socket: frames without end, garbage, thousands of connections.

`command(how)` is run in the tenant's directory; it says "begins" and goes on until it is killed.
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

print("begins", flush=True)
while True:
    try:
        globals()[sys.argv[1]]()
    except OSError:
        pass
"""

KINDS = ("frames", "questions", "garbage", "connects", "mute", "stolen")


def command(how: str) -> list[str]:
    """The command line of one of KINDS."""
    assert how in KINDS, how
    return [sys.executable, "-c", _PROGRAM, how]
