"""CRDs: generates the CustomResourceDefinitions from SharePod's models and the PodSpec of a real API server."""
