"""Binpack: ranks the places for a request so that room is left for the requests that past arrivals make likely. The
inner loops are C (native/)."""
