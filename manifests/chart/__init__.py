"""Maker of the Helm chart and of the single file dist/install.yaml, both from the kustomize folders."""
