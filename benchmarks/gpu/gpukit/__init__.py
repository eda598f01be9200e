"""The GPU kit: measures hook and agent on a machine with an NVIDIA GPU, without Kubernetes and network.

Standard library only. It starts the real agent, standalone, and workloads under the real hook; only these programs use
the GPU. All of them end with the kit, however it ends.
"""
