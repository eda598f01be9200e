"""Table of driver entry points: made from NVIDIA's headers and one hand-written classification. See README.md."""
