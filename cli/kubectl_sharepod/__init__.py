"""kubectl plugin of SharePod. It reads and writes only through kubectl, with the user's own rights."""
