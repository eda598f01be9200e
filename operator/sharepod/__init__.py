"""SharePod: many Kubernetes pods share NVIDIA GPUs.

`api` has the objects that users and components exchange, `placement` chooses the GPUs of a request, and `timeshare`
decides whose turn a GPU is; all three are pure. `protocol` is the wire format between hook and agent. `controller` (the
operator) and `agent` are the programs that act.
"""

__version__ = "0.1.0"
