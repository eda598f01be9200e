"""The kubelet's side: CSI driver and its registration, plugin pods, processes of pods."""
