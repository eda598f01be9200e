"""kubectl plugin of SharePod. It calls the API server only through kubectl, with the user's own rights."""
