"""The agent as a CSI driver: inline ephemeral volumes that carry a tenant's socket, limits and hook into its pod.

The kubelet, not the tenant, says which pod a volume is for. `csi.proto` and `registration.proto`: the part of the
standards that is spoken; `mounts` and `volumes`: what is mounted where; `admission`: whose volume it is; `rpc` and
`driver`: the services.
"""
