"""The operator: places SharePods, keeps the ledger of every GPUNode, makes and follows their Pods.

What decides takes facts and returns values (`phases`, `conditions`, placement's engine); what acts is plain (`ledger`,
`pod_control`, `release`, `status`, `events`, `nodes`). Watches only bring the model up to date and enqueue keys.
"""
