"""ResourceClaims: the same request as a claim, and the claims that the operator and admission create."""
