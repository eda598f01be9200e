"""The agent as a CSI driver: inline ephemeral volumes that carry a tenant's socket, limits and hook into its pod.

The kubelet, not the tenant, says which pod a volume is for. `messages`: the part of the CSI and plugin-registration
standards that is spoken; `mounts` and `volumes`: what is mounted where; `admission`: whose volume it is; `driver`: the
services.
"""
