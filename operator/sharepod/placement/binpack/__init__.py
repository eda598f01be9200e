"""Binpack: ranks nodes and GPUs for a request by what arrivals so far have requested, so that likely requests keep
room. The inner loops are C (native/)."""
