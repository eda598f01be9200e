"""Lines of a watch that break the protocol. A real API server does not send them, but a proxy, a bug or another version
of an API server may.
"""

from __future__ import annotations

ODD_WORDS = (
    b'{"type":"ERROR","object":{"kind":"Status"}}\n',
    b'{"type":"ERROR","object":{"code":"410","details":[],"message":{}}}\n',
    b'{"type":"ERROR","object":null}\n',
    b'{"type":"BOOKMARK","object":{"metadata":{"resourceVersion":"1"}}}\n',
    '{"type":"BOOKMARK","object":{"metadata":{"resourceVersion":"١٢"}}}\n'.encode(),
    b'{"type":"BOOKMARK","object":{"metadata":{"resourceVersion":9e99}}}\n',
    b'{"type":"BOOKMARK","object":{"metadata":{"resourceVersion":"9999999999999999999"}}}\n',
    b'{"type":"DELETED","object":{}}\n',
    b'{"type":"DELETED","object":{"metadata":{"uid":["u"],"resourceVersion":"-7"}}}\n',
    b'{"type":"SOMETHING","object":{"metadata":{"name":"n","uid":"u","resourceVersion":"1e400"},"spec":7,"status":[]}}\n',
    b'{"type":["ADDED"],"object":{"metadata":"n","spec":-0.0,"status":{"conditions":[1e400,NaN,null]}}}\n',
    b'{"type":"MODIFIED","object":{"metadata":{"name":"half","namespace":"a li',
    b'[1]\nnull\n\n{}\n"\xff"\n',
    b'{"type":"ADDED","object":' + b'{"a":[' * 50_000,
    b'{"type":"ERROR","object":{"code":410,"details":' + b'{"a":[' * 50_000,
)
