"""SharePod: many Kubernetes pods share NVIDIA GPUs.

`api` holds the objects that users and components exchange, `placement` decides which GPU, `timeshare` decides whose
turn it is: all three are pure. `protocol` is the wire format between hook and agent. `controller` (the operator) and
`agent` are the programs that act.
"""

__version__ = "0.1.0"
