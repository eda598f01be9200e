"""The GPU kit: what a machine with an NVIDIA GPU makes of the hook and the agent, without Kubernetes and network.

Standard library only. It starts the real agent, standalone, and workloads under the real hook; it uses the GPU through
these programs alone. Whatever it starts ends with it, however it ends.
"""
