"""Interfaces to the node's kubelet: CSI and DRA drivers and their registration, plugin pods (which have whole GPUs from
NVIDIA's device plugin), and the processes of pods."""
