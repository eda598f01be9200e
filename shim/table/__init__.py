"""Table of driver entry points, generated from NVIDIA's headers and a hand-written classification. See README.md."""
