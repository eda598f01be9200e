"""CRDs with several versions. Pure: a CRD with the hub's version in, the CRD with all versions of its kind out."""

from __future__ import annotations

import copy
from typing import Any, Final

from sharepod.api.versions.conversion_review import REVIEW_VERSION
from sharepod.api.versions.kind_versions import KindVersions

CONVERSION_PATH: Final = "/convert"
CONVERSION_SERVICE: Final = "sharepod-conversion"
"""Service of the operators' conversion servers, in manifests/conversion."""

_IN_CLUSTER: Final = {
    "service": {"namespace": "sharepod-system", "name": CONVERSION_SERVICE, "path": CONVERSION_PATH, "port": 443}
}


def with_versions(crd: dict[str, Any], versions: KindVersions, client: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the CRD with all versions of its kind; the CRD as it is where there is one.

    Args:
        crd: CRD with the hub's version alone.
        versions: Versions of the kind.
        client: `clientConfig` of the conversion webhook; None: the Service of manifests/conversion. Its `caBundle` is
            left to whoever makes the certificate.
    """
    if not versions.further:
        return crd
    crd = copy.deepcopy(crd)
    (hub,) = crd["spec"]["versions"]
    others = [version.definition(copy.deepcopy(hub)) for version in versions.further]
    for entry, version in zip(others, versions.further, strict=True):
        entry |= {"name": version.name, "served": version.served}
    hub["served"] = versions.hub_served
    for entry in (hub, *others):
        entry["storage"] = entry["name"] == versions.stored
    crd["spec"]["versions"] = [hub, *others]
    crd["spec"]["conversion"] = {
        "strategy": "Webhook",
        "webhook": {
            "conversionReviewVersions": [REVIEW_VERSION.rpartition("/")[2]],
            "clientConfig": client or copy.deepcopy(_IN_CLUSTER),
        },
    }
    return crd
