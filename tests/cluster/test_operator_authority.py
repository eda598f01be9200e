"""The certificate authority of the API server is replaced while the operator runs."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest
from cluster.fake_agents import FakeAgents
from cluster.operator_world import AGENT_LEASE, TIMES, World, wait
from harness.certs import Authority
from harness.cluster import Cluster
from harness.fakes import FakeKubelets

NAME = "api.operator.test"
"""Name by which the operator calls the API server; its certificate differs from other clients'."""


def _by_own_name(cluster: Cluster, authority: Path, folder: Path) -> Path:
    """Return a kubeconfig of the operator that uses `NAME` and trusts the file `authority`."""
    token = cluster.service_account_token("sharepod-system", "sharepod-operator")
    config = json.loads(cluster.kubeconfig_for(token).read_text())
    server = config["clusters"][0]["cluster"]["server"]
    config["clusters"][0]["cluster"] = {
        "server": server,
        "certificate-authority": str(authority),
        "tls-server-name": NAME,
    }
    path = folder / "kubeconfig"
    path.write_text(json.dumps(config))
    return path


@pytest.mark.timeout(300)
@pytest.mark.promise("operator-other-authority")
def test_the_operator_goes_on_once_the_authority_that_it_trusts_is_replaced(tmp_path: Path) -> None:
    former, later = Authority(tmp_path / "former"), Authority(tmp_path / "later")
    shown, mounted = tmp_path / "shown", tmp_path / "ca.crt"
    shown.mkdir()

    def show(authority: Authority) -> None:
        pair = authority.issue("server", "apiserver", addresses=[NAME])
        shutil.copy(pair.key, shown / "tls.key")
        shutil.copy(pair.certificate, shown / "tls.crt")

    show(former)
    shutil.copy(former.certificate, mounted)
    certificates = f"--tls-sni-cert-key={shown / 'tls.crt'},{shown / 'tls.key'}:{NAME}"
    with (
        Cluster(apiserver_args=[certificates]) as cluster,
        FakeKubelets(cluster.api) as kubelets,
        FakeAgents(cluster.api, duration=AGENT_LEASE, renew=0.5) as agents,
    ):
        world = World(cluster, kubelets, agents, TIMES)
        world.times = {**TIMES, "SHAREPOD_KUBECONFIG": str(_by_own_name(cluster, mounted, tmp_path))}
        operator = world.start_operator()
        world.nodes("authority")
        namespace = cluster.namespace("authority")
        world.apply(namespace, "before", {"request": 0.2}, on="authority")
        world.phase(namespace, "before", "Running")
        cluster.stop_apiserver()
        show(later)
        cluster.start_apiserver()
        wait(lambda: "certificate verify failed" in operator.log.read_text(), what="a certificate that is not trusted")
        world.apply(namespace, "after", {"request": 0.2}, on="authority")
        shutil.copy(later.certificate, mounted)
        began = time.monotonic()
        world.phase(namespace, "after", "Running")
        print(f"authority replaced: {time.monotonic() - began:.1f} s until a SharePod ran")
        assert operator.running()
        assert world.operator is operator
