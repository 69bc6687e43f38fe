"""Which of the caller's variables reach the installers, and which the code of a wheel."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ci.trial import variables

BOTH = [
    *("PATH", "LD_LIBRARY_PATH", "TMPDIR", "TEMP", "TMP", "LANG", "LANGUAGE", "LC_ALL", "TZ"),
    *("TERM", "COLORTERM", "COLUMNS", "NO_COLOR", "FORCE_COLOR"),
    *("SYSTEMROOT", "SYSTEMDRIVE", "WINDIR", "COMSPEC", "PATHEXT", "OS", "NUMBER_OF_PROCESSORS", "PROCESSOR_LEVEL"),
    *("PROGRAMDATA", "PROGRAMFILES(X86)", "PROGRAMW6432", "COMMONPROGRAMFILES(X86)", "ALLUSERSPROFILE"),
]
INSTALLERS = [
    *("XDG_CACHE_HOME", "HOMEDRIVE", "HOMEPATH"),
    *("UV_DEFAULT_INDEX", "UV_OFFLINE", "UV_PYTHON_INSTALL_DIR", "PIP_INDEX_URL", "NETRC"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
    *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"),
]
CODE = [
    *("CUDA_VISIBLE_DEVICES", "CUDA_PATH_V12_8", "NVIDIA_TF32_OVERRIDE", "MLX_CUDA_CAPABILITY"),
    *("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"),
]
NOBODY = [
    *(
        "GH_TOKEN",
        "GH_CONFIG_DIR",
        "GITHUB_TOKEN",
        "GITHUB_ENV",
        "GITHUB_PATH",
        "GITHUB_OUTPUT",
        "RUNNER_TEMP",
        "TWINE_PASSWORD",
        "TWINE_USERNAME",
    ),
    *("UV_PUBLISH_TOKEN", "UV_PUBLISH_URL", "UV_INDEX_PRIVATE_PASSWORD", "UV_PYTHON", "ACTIONS_RUNTIME_TOKEN", "ACTIONS_CACHE_URL"),
    *("AWS_ACCESS_KEY_ID", "AWS_PROFILE", "MLX_CUDA_FOO_TOKEN", "CUDA_SECRET", "CUDA_SECRETS_FILE", "NVIDIA_API_KEY", "MLX_APIKEYS"),
    *("NVIDIA_CREDENTIALS", "MLX_AUTH", "CUDA_COOKIE", "PIP_PASSWD", "PIP_PROXY_PASS", "MLX_PASSPHRASE", "SSH_AUTH_SOCK", "GPG_AGENT_INFO"),
    *("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "PYTHONINSPECT", "VIRTUAL_ENV", "CONDA_PREFIX", "PYTEST_ADDOPTS", "LD_PRELOAD"),
    *("MLX_CUDA_INDEX_PRIVATE_UPLOAD", "MLX_CUDA_INDEX_PYPI_SIMPLE"),
    *("DBUS_SESSION_BUS_ADDRESS", "GIT_DIR", "GIT_ASKPASS", "KUBECONFIG", "DOCKER_HOST", "MY_PATH", "PATHOLOGY", "MYUV_X"),
]


@pytest.fixture(autouse=True)
def _all_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*BOTH, *INSTALLERS, *CODE, *NOBODY):
        monkeypatch.setenv(name, "set")


@pytest.mark.parametrize("name", [*BOTH, *INSTALLERS, *CODE, *NOBODY])
def test_what_passes(name: str, tmp_path: Path) -> None:
    assert (name in variables.for_installers()) == (name in {*BOTH, *INSTALLERS})
    assert (name in variables.for_code(tmp_path)) == (name in {*BOTH, *CODE})


@pytest.mark.skipif(os.name == "nt", reason="Windows knows capital letters alone")
def test_small_letters_are_another_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("https_proxy", "mlx_token", "uv_publish_url"):
        monkeypatch.setenv(name, "small")
    assert "https_proxy" in variables.for_installers()
    assert not {"https_proxy", "mlx_token", "uv_publish_url"} & set(variables.for_code(tmp_path))
    assert "uv_publish_url" not in variables.for_installers()


def test_the_code_has_a_home_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("HOME", "USERPROFILE", "APPDATA", "LOCALAPPDATA")
    for name in names:
        monkeypatch.setenv(name, "the caller's")
    assert {variables.for_code(tmp_path)[name] for name in names} == {str(tmp_path)}
    assert {variables.for_installers()[name] for name in names} == {"the caller's"}


def test_both_are_kept_from_the_users_packages(tmp_path: Path) -> None:
    for found in (variables.for_installers(), variables.for_code(tmp_path)):
        assert (found["PYTHONNOUSERSITE"], found["PYTHONUTF8"]) == ("1", "1")
