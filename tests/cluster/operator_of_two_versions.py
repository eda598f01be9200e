"""Operator that knows a second version of the API, `doubles/second_version.py`; otherwise `sharepod-operator`."""

from __future__ import annotations

from doubles import second_version
from sharepod.controller import handlers
from sharepod.controller.main import main

if __name__ == "__main__":
    handlers.KINDS = second_version.kinds()
    main()
