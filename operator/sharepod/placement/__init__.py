"""Where a SharePod goes: pure functions over one in-memory model of the cluster. No I/O and no clock.

`cluster.Cluster` knows the nodes, their GPUs and who has reserved what; `engine.place` decides over it and changes
nothing; `needs` reads out of Kubernetes' own objects what placement goes by.
"""
