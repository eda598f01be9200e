"""The kubelet's side: CSI and DRA drivers and their registration, plugin pods, processes of pods."""
