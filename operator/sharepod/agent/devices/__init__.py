"""GPUs of the node and the processes on them: inventory, NVML, Xids and context overhead."""
