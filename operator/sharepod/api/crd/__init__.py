"""CRDs: the CustomResourceDefinitions, generated from the models and a real API server's PodSpec."""
