"""The GPU kit: measures hook and agent on a machine with an NVIDIA GPU, without Kubernetes and network.

Standard library only. The kit starts the real agent, standalone, and workloads under the real hook; only these programs
use the GPU. All of them end when the kit ends, even if it is killed.
"""
