"""Real Kubernetes for SharePod's tests and demo: control planes, fake nodes, and a real kubelet. See README.md."""
