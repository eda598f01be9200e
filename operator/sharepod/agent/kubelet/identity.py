"""Identity of an object of the API server, as the kubelet names it in a call."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class KubeletIdentity:
    """Identity of a Pod or a claim in a call of the kubelet. As text: namespace and name."""

    namespace: str
    name: str
    uid: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"
