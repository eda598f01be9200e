"""Binpack: ranks places for a request so that requests which are likely by past arrivals keep room. The inner loops are
C (native/)."""
