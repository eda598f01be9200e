"""The operator: places SharePods, keeps the ledger of every GPUNode, creates and follows their Pods."""
