"""Interfaces to the node's kubelet: CSI and DRA drivers and their registration, plugin pods, processes of pods."""
