"""One tenant, from its first look to its last: snapshot, act, confirm, evict, write the status."""
