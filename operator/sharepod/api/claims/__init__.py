"""ResourceClaims: reading claims into the same request as a SharePod, and the claims that the operator and admission
create."""
