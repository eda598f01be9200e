"""The Helm chart and the single file dist/install.yaml, both made of the kustomize folders."""
