"""The operator's settings: one object, checked at start, with messages that name the field."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from sharepod.controller.settings import FILE_VARIABLE, OperatorSettings, SettingsError, load

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in OperatorSettings.model_fields:
        monkeypatch.delenv(f"SHAREPOD_{name.upper()}", raising=False)
    monkeypatch.delenv(FILE_VARIABLE, raising=False)


def write(monkeypatch: pytest.MonkeyPatch, folder: Path, text: str) -> None:
    path = folder / "settings.yaml"
    path.write_text(text)
    monkeypatch.setenv(FILE_VARIABLE, str(path))


def test_without_any_the_defaults_are_those_of_the_documentation() -> None:
    settings = load()
    assert settings.runtime_class == "nvidia"
    assert [item.manifest() for item in settings.tolerations] == [{"key": "nvidia.com/gpu", "operator": "Exists"}]
    assert settings.lease_duration > settings.renew_deadline


def test_the_environment_comes_before_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write(monkeypatch, tmp_path, "runtime_class: other\nbind_timeout: 5\n")
    monkeypatch.setenv("SHAREPOD_BIND_TIMEOUT", "7")
    settings = load()
    assert (settings.runtime_class, settings.bind_timeout) == ("other", 7)


def test_the_settings_of_the_manifests_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    path = ROOT / "manifests" / "operator" / "settings.yaml"
    monkeypatch.setenv(FILE_VARIABLE, str(path))
    settings = load()
    assert settings.runtime_class == yaml.safe_load(path.read_text())["runtime_class"]


@pytest.mark.promise("install-wrong-settings")
@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("bind_timeuot: 5\n", r"bind_timeuot: is not a setting; did you mean bind_timeout\?"),
        ("zzz: 5\n", "zzz: is not a setting; remove it"),
        ("bind_timeout: soon\n", "bind_timeout"),
        ("bind_timeout: -1\n", "bind_timeout"),
        ("metrics_port: 70000\n", "metrics_port"),
        ("tolerations: [{key: a, operator: Maybe}]\n", "tolerations.0.operator"),
        ("lease_duration: 12\n", "renew_deadline"),
        ("retry_period: 6\n", "retry_period"),
        ("usage_half_life: .inf\n", "usage_half_life"),
        ("lease_duration: .inf\n", "lease_duration"),
        ("log_level: loud\n", "log_level"),
        ("[1]\n", "settings.yaml"),
        ("a: [\n", "settings.yaml"),
    ],
)
def test_an_invalid_setting_is_refused_with_its_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, names: str
) -> None:
    write(monkeypatch, tmp_path, text)
    with pytest.raises(SettingsError, match=names) as raised:
        load()
    assert "OperatorSettings" not in str(raised.value)


def test_a_refused_setting_names_the_source_of_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write(monkeypatch, tmp_path, "log_level: loud\n")
    with pytest.raises(SettingsError, match=r"\. Settings come from .*settings\.yaml and from SHAREPOD_"):
        load()


def test_a_file_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FILE_VARIABLE, "/nowhere/settings.yaml")
    with pytest.raises(SettingsError, match=r"/nowhere/settings\.yaml"):
        load()


def test_every_setting_is_documented() -> None:
    source = (ROOT / "operator" / "sharepod" / "controller" / "settings.py").read_text()
    body = source[source.index("class OperatorSettings") :]
    for name in OperatorSettings.model_fields:
        if name not in ("log_level", "log_format"):  # the messages of these settings list the choices
            after = body[body.index(f"    {name}: ") :].split("\n\n")[0]
            assert '"""' in after, name


@pytest.mark.promise("security-annotations")
def test_pods_get_the_annotations_that_the_settings_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write(monkeypatch, tmp_path, 'annotations: ["example.com/*", "*"]')
    assert load().pods().annotations == ("example.com/*", "*")
    write(monkeypatch, tmp_path, 'annotations: ["*/*"]')
    with pytest.raises(SettingsError, match="annotations"):
        load()
