"""Settings of the agent: their sources, and values that are refused."""

from __future__ import annotations

import inspect
import os
from pathlib import Path

import pytest
from pydantic import ValidationError
from sharepod.agent.settings import AgentMode, AgentSettings


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("SHAREPOD_AGENT_"):
            monkeypatch.delenv(name)


def test_environment_beats_the_file_and_arguments_beat_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "agent.yaml"
    file.write_text("node_name: from-file\ngrace_ms: 500\nquantum_max_ms: 50\n")
    monkeypatch.setenv("SHAREPOD_AGENT_CONFIG", str(file))
    monkeypatch.setenv("SHAREPOD_AGENT_NODE_NAME", "from-env")
    settings = AgentSettings(quantum_max_ms=60)
    assert (settings.node_name, settings.grace_ms, settings.quantum_max_ms) == ("from-env", 500, 60)


def test_the_scheduler_is_set_in_nanoseconds() -> None:
    config = AgentSettings(quantum_min_ms=2, grace_ms=250).timeshare()
    assert (config.quantum_min_ns, config.grace_ns) == (2_000_000, 250_000_000)


def test_sharing_of_a_gpu_is_that_of_its_uuid_or_model_or_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHAREPOD_AGENT_SHARING", "Concurrent")
    monkeypatch.setenv("SHAREPOD_AGENT_SHARING_BY_GPU", '{"A100": "Exclusive", "GPU-1": "Concurrent"}')
    settings = AgentSettings()
    gpus = {("GPU-0", "H100"): "CONCURRENT", ("GPU-0", "A100"): "EXCLUSIVE", ("GPU-1", "A100"): "CONCURRENT"}
    assert {gpu: settings.sharing_of(*gpu).name for gpu in gpus} == gpus


@pytest.mark.promise("install-wrong-settings")
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"quantum_min_ms": 200}, "quantum_min_ms 200 is more than quantum_max_ms 100"),
        ({"mode": "standalone"}, "set tenants_file"),
        ({"state_dir": "somewhere"}, "give a path that begins with /"),
        ({"http_port": 99999}, "http_port"),
        ({"mode": "cloud"}, "mode"),
        ({"no_such_setting": 1}, "no_such_setting"),
        ({"sharing_by_gpu": {"A100": "Both"}}, "sharing_by_gpu.A100"),
    ],
)
def test_wrong_settings_are_refused_by_name(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        AgentSettings(**changes)  # type: ignore[arg-type]


@pytest.mark.promise("install-wrong-settings")
def test_an_unknown_key_in_the_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "agent.yaml"
    file.write_text("grace: 500\n")
    monkeypatch.setenv("SHAREPOD_AGENT_CONFIG", str(file))
    with pytest.raises(ValidationError, match="grace"):
        AgentSettings()


def test_a_file_that_is_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHAREPOD_AGENT_CONFIG", str(tmp_path / "none.yaml"))
    with pytest.raises(ValidationError, match="is not a file"):
        AgentSettings()


def test_every_field_is_documented() -> None:
    source = inspect.getsource(AgentSettings)
    for name in AgentSettings.model_fields:
        after = source.split(f"    {name}:", 1)[1].split("\n", 1)[1].lstrip()
        assert after.startswith('"""'), f"{name} has no docstring"


def test_the_default_is_the_cluster() -> None:
    assert AgentSettings().mode is AgentMode.CLUSTER
