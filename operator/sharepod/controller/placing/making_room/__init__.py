"""Making room: who makes room for those that wait, by time, by a move or by an eviction."""
