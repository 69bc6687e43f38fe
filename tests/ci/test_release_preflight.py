"""What stops a release before anything is built: told all at once, each with its fix."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from ci import __main__ as cli
from ci import index
from ci.errors import CheckFailed, EnvironmentProblem
from ci.index import Index, Remote
from ci.matrix import Platform
from ci.release import changelog, dependencies, github, preflight, standing
from ci.toolkit import uv

from .release_support import MATRIX, VERSION
from .trial_support import ALWAYS, Gh, make_gh, record

REPOSITORY = "owner/name"
ENVIRONMENTS = f"repos/{REPOSITORY}/environments?per_page=100"
PYPI = index.named("pypi")
TEST = index.named("testpypi")
CUSTOM = {"protected_branches": False, "custom_branch_policies": True}
LIMIT = "limit its deployment branches and tags"
REVIEWED = [{"type": "required_reviewers"}, {"type": "branch_policy"}]


@pytest.fixture
def gh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Gh:
    """GitHub, where all is set up."""
    made = make_gh(tmp_path / "gh", monkeypatch)
    monkeypatch.setenv("GITHUB_SERVER_URL", "https://github.example")
    monkeypatch.setenv("GITHUB_REPOSITORY", REPOSITORY)
    monkeypatch.setenv(github.RUNNER, "gpu")
    monkeypatch.setattr(github, "load", lambda: replace(MATRIX, repository=f"https://github.example/{REPOSITORY}"))
    set_up(made)
    for name, refs in {"pypi": ["tag v*"], "testpypi": ["branch main"], "gpu": ["branch main", "tag v*"]}.items():
        limit(made, name, refs)
    return made


def set_up(gh: Gh, **changes: dict[str, Any] | None) -> None:
    environments: dict[str, dict[str, Any] | None] = {
        "pypi": {"deployment_branch_policy": CUSTOM, "protection_rules": REVIEWED},
        "testpypi": {"deployment_branch_policy": CUSTOM, "protection_rules": []},
        "gpu": {"deployment_branch_policy": CUSTOM, "protection_rules": []},
        **changes,
    }
    gh.answer(ENVIRONMENTS, json.dumps({"environments": [{"name": name, **each} for name, each in environments.items() if each]}))


def limit(gh: Gh, name: str, refs: Sequence[str]) -> None:
    policies = [dict(zip(("type", "name"), ref.split(), strict=True)) for ref in refs]
    path = f"repos/{REPOSITORY}/environments/{name}/deployment-branch-policies?per_page=100"
    gh.answer(path, json.dumps({"branch_policies": policies}))


@pytest.fixture
def ready(gh: Gh, monkeypatch: pytest.MonkeyPatch) -> Gh:
    """A checkout, an index and a GitHub that a release may start from."""
    monkeypatch.setattr(preflight, "current", lambda _: Version(VERSION))
    monkeypatch.setattr(changelog, "entry", lambda *_: changelog.Entry(VERSION, None, "news"))
    monkeypatch.setattr(preflight, "dependencies", lambda *_: iter(()))
    monkeypatch.setattr(standing, "tagged", lambda _: set())
    hold(monkeypatch)
    return gh


def hold(monkeypatch: pytest.MonkeyPatch, *versions: str, on: str = "pypi") -> None:
    """Put files of these versions on an index; any other is empty."""
    files = tuple(Remote(f"{version}.whl", Version(version), "0", 1) for version in versions)
    monkeypatch.setattr(Index, "files", lambda self, project, **_: files if (self.name, project) == (on, MATRIX.name) else ())


def refused(tag: str | None = f"v{VERSION}", on: Index = PYPI) -> str:
    with pytest.raises(CheckFailed, match="this release cannot be published") as failure:
        preflight.preflight(on, tag=tag)
    return str(failure.value)


def test_all_is_well(ready: Gh) -> None:
    assert preflight.preflight(PYPI, tag=f"v{VERSION}") == Version(VERSION)
    policies = [f"repos/{REPOSITORY}/environments/{name}/deployment-branch-policies?per_page=100" for name in ("pypi", "testpypi", "gpu")]
    assert ready.calls == [["api", "--hostname", "github.example", path] for path in (ENVIRONMENTS, *policies)]


def test_everything_is_told_at_once(ready: Gh, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed query does not hide other findings."""

    def unreachable(self: Index, project: str, **_: bool) -> tuple[Remote, ...]:
        raise EnvironmentProblem("the index cannot be read")

    monkeypatch.setattr(Index, "files", unreachable)
    monkeypatch.setattr(preflight, "dependencies", lambda *_: iter([standing.finding("dependencies", "no mlx", "wait")]))
    monkeypatch.setattr(preflight, "load", lambda: replace(MATRIX, mlx="9.9"))
    project = {"dependencies": ["mlx==9", "other"], "optional-dependencies": {}, "requires-python": ">=3.10"}
    monkeypatch.setattr(preflight, "_project", lambda: project)
    monkeypatch.setenv(github.RUNNER, "")
    monkeypatch.setenv("GITHUB_SERVER_URL", "https://github.elsewhere")
    ready.answer(ENVIRONMENTS, "", code=1, err="gh: Resource not accessible (HTTP 403)\n")

    def silent(version: Version, text: str) -> None:
        raise CheckFailed("nothing is new\n  fix: write")

    monkeypatch.setattr(changelog, "entry", silent)
    owner = "docs/factory/releasing.md, Set up a repository"
    here, stated = (f"https://github.{host}/{REPOSITORY}" for host in ("elsewhere", "example"))
    assert refused("v1").splitlines() == [
        "this release cannot be published:",
        f"  tag: the tag is v1, expected v{VERSION}, which pyproject.toml says",
        "    fix: tag the commit with that version; python -m ci release stamp VERSION changes the version",
        "  changelog: nothing is new",
        "    fix: write",
        "  variable: MLX_CUDA_GPU_RUNNER is not set: no machine with a GPU would try the wheels",
        f"    fix: set the repository variable: {owner}",
        f"  repository: this is {here}, but ci/matrix/matrix.toml says {stated}: who builds elsewhere gets another METADATA",
        "    fix: set repository in ci/matrix/matrix.toml",
        "  unknown: GitHub does not say what owner/name has: gh: Resource not accessible (HTTP 403)",
        "    fix: a token that may read Actions in this repository",
        "  unknown: the index cannot be read",
        "    fix: run again",
        "  pins: pyproject.toml requires mlx==9, other, but ci/matrix/matrix.toml says mlx 9.9",
        "    fix: python -m ci bump --mlx VERSION changes both",
        "  dependencies: no mlx",
        "    fix: wait",
    ]


@pytest.mark.parametrize("tag", [None, VERSION, f"v{VERSION}rc1"])
def test_the_tag_is_the_versions(ready: Gh, tag: str | None) -> None:
    assert f"the tag is {tag or 'missing'}, expected v{VERSION}" in refused(tag)


def test_a_checkout_without_a_version(ready: Gh, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(root: Path) -> Version:
        raise CheckFailed("no version")

    monkeypatch.setattr(preflight, "current", none)
    with pytest.raises(CheckFailed, match="no version"):
        preflight.preflight(None, tag=None)


@pytest.mark.parametrize(
    ("held", "said"),
    [
        (
            [VERSION],
            f"version: {VERSION} is on pypi already, which accepts no other files under the same names\n"
            "    fix: if a run was interrupted over it, “Re-run failed jobs” of that run; otherwise the next number\n",
        ),
        (["0.30.0"], "owner: mlx-cuda on pypi is not ours"),
        (["99.0"], f"version: {VERSION} does not sort above 99.0"),
    ],
)
def test_the_index(ready: Gh, monkeypatch: pytest.MonkeyPatch, held: list[str], said: str) -> None:
    hold(monkeypatch, *held)
    assert said in f"{refused()}\n"


@pytest.mark.parametrize("on", [None, TEST])
def test_a_rehearsal_tells_what_a_release_would_stop_at(
    ready: Gh, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], on: Index | None
) -> None:
    """Of the same number. It stops only at what stops itself: without an index nothing waits for the GPU."""
    monkeypatch.setattr(preflight, "current", lambda _: Version(f"{VERSION}.dev1"))
    assert preflight.preflight(on, tag=None) == Version(f"{VERSION}.dev1")
    assert [line for line in capsys.readouterr().err.splitlines() if "would stop" in line] == []
    hold(monkeypatch, VERSION, on="pypi")
    monkeypatch.delenv(github.RUNNER)
    set_up(ready, testpypi=None)

    def entry(version: Version, _: str) -> None:
        if not version.is_prerelease:
            raise CheckFailed(f"nothing of {version}")

    monkeypatch.setattr(changelog, "entry", entry)
    if on:
        with pytest.raises(CheckFailed, match="variable: MLX_CUDA_GPU_RUNNER is not set"):
            preflight.preflight(on, tag=None)
        monkeypatch.setenv(github.RUNNER, "gpu")
        capsys.readouterr()
    assert preflight.preflight(on, tag="v1") == Version(f"{VERSION}.dev1")
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("a release would stop at: ")]
    assert [line.split(": ")[1] for line in told] == ["changelog", *["variable"] * (on is None), "environment", "version"]
    assert f"{VERSION} is on pypi already" in told[-1]
    monkeypatch.setattr(preflight, "load", lambda: replace(MATRIX, mlx="9.9"))
    with pytest.raises(CheckFailed, match="pins: ") as failure:
        preflight.preflight(on, tag=None)
    assert "variable" not in str(failure.value)


def test_a_rehearsal_stops_where_its_notes_would(ready: Gh, monkeypatch: pytest.MonkeyPatch) -> None:
    def entry(version: Version, _: str) -> None:
        raise CheckFailed(f"nothing of {version}")

    monkeypatch.setattr(changelog, "entry", entry)
    with pytest.raises(CheckFailed, match=f"changelog: nothing of {VERSION}"):
        preflight.preflight(None, tag=None)


def test_a_rehearsal_stops_at_what_the_test_index_would_refuse(ready: Gh, monkeypatch: pytest.MonkeyPatch) -> None:
    hold(monkeypatch, "0.30.0", on="testpypi")
    with pytest.raises(CheckFailed, match="owner: mlx-cuda on testpypi is not ours"):
        preflight.preflight(TEST, tag=None)


def test_what_the_checkout_requires(ready: Gh, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = dict[str, Any]()

    def note(extras: Any, python: str) -> list[Any]:
        asked.update(extras=extras, python=python)
        return []

    monkeypatch.setattr(preflight, "dependencies", note)
    preflight.preflight(PYPI, tag=f"v{VERSION}")
    extras, python = asked["extras"], asked["python"]
    assert python == "3.10"
    assert set(extras) == {"cpu", *(cuda.extra for cuda in MATRIX.cuda.values())}
    assert Requirement(f"mlx=={MATRIX.mlx}") in extras["cpu"]
    assert Requirement(f"mlx-cuda-13=={MATRIX.mlx}") in extras["cu13"]


def settings() -> list[str]:
    return [str(each) for each in (*github.runner(), *github.repository())]


def test_settings(gh: Gh, monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings() == []
    monkeypatch.setenv("GITHUB_REPOSITORY", "fork/name")
    (said,) = settings()
    assert said.startswith("repository: this is https://github.example/fork/name, but ci/matrix/matrix.toml says ")
    monkeypatch.delenv(github.RUNNER)
    assert settings()[0].startswith("variable: MLX_CUDA_GPU_RUNNER is not set")


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("gpu", None, "there is no environment gpu\n    fix: make it"),
        (
            "pypi",
            {"deployment_branch_policy": CUSTOM, "protection_rules": [{"type": "branch_policy"}]},
            "the environment pypi has no required reviewers\n    fix: name its required reviewers",
        ),
        (
            "gpu",
            {"deployment_branch_policy": None, "protection_rules": []},
            f"the environment gpu lets in any branch or tag, expected branch main and tag v*\n    fix: {LIMIT}",
        ),
        (
            "testpypi",
            {"deployment_branch_policy": {"protected_branches": True, "custom_branch_policies": False}, "protection_rules": []},
            f"the environment testpypi lets in protected branches, expected branch main\n    fix: {LIMIT}",
        ),
    ],
)
def test_environments(gh: Gh, name: str, change: dict[str, Any] | None, said: str) -> None:
    assert list(github.environments()) == []
    set_up(gh, **{name: change})
    (found,) = github.environments()
    assert found.check == "environment"
    assert str(found) == f"environment: {said}: docs/factory/releasing.md, Set up a repository"


@pytest.mark.parametrize(("refs", "spelt"), [(["branch main", "tag v*"], "branch main and tag v*"), ([], "nothing"), (["tag *"], "tag *")])
def test_refs_of_an_environment(gh: Gh, refs: list[str], spelt: str) -> None:
    limit(gh, "pypi", refs)
    (found,) = github.environments()
    assert found.message.startswith(f"the environment pypi lets in {spelt}, expected tag v*")


def test_a_policy_without_a_type_is_of_branches(gh: Gh) -> None:
    gh.answer(f"repos/{REPOSITORY}/environments/pypi/deployment-branch-policies?per_page=100", '{"branch_policies": [{"name": "main"}]}')
    (found,) = github.environments()
    assert found.message == "the environment pypi lets in branch main, expected tag v*"


def test_gh_asks_for_nothing(gh: Gh, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = record(monkeypatch, out='{"environments": []}')
    assert len(list(github.environments())) == 3
    command = ["gh", "api", "--hostname", "github.example", ENVIRONMENTS]
    assert runs == [(command, ALWAYS)]


def test_gh_is_needed(gh: Gh, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    with pytest.raises(EnvironmentProblem, match=r"^gh is not installed\n  fix: https://cli\.github\.com$"):
        list(github.environments())


def test_dependencies_that_nobody_published(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Each extra is asked for on each platform; one that requires nothing is not asked for."""
    asked = []

    def resolve(platform: Platform, folder: Path, *arguments: str, lines: str | None = None) -> str:
        assert folder.is_dir()
        asked.append((platform.name, arguments, lines))
        if platform.name == "win-amd64":
            raise CheckFailed("no\n  wheel")
        return ""

    monkeypatch.setattr(dependencies, "resolve", resolve)
    wanted = {"cpu": [Requirement("a==1"), Requirement("b>=2,<3; extra == 'cpu'")], "none": []}
    (found,) = dependencies.dependencies(wanted, "3.11")
    arguments = ("--python-version", "3.11", "--python", sys.executable, "-")
    assert asked == [(platform, arguments, "a==1\nb<3,>=2\n") for platform in MATRIX.platforms]
    said = "dependencies: the extra cpu cannot be installed on win-amd64, CPython 3.11: no wheel"
    assert str(found) == f"{said}\n    fix: wait until they are published, or pin versions that are: python -m ci bump"
    assert capsys.readouterr().err == "".join(f"resolving the extra cpu for {platform}\n" for platform in MATRIX.platforms)


def test_how_uv_resolves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    platform = MATRIX.platforms["linux-aarch64"]
    runs = record(monkeypatch, out="a==1\n")
    assert dependencies.resolve(platform, tmp_path, "-", lines="a\n") == "a==1\n"
    command = [uv.executable(), "pip", "compile", "--quiet", "--no-build", "--python-platform", platform.uv, "-"]
    assert runs == [(command, {key: each for key, each in ALWAYS.items() if key != "stdin"} | {"cwd": tmp_path, "input": "a\n"})]
    record(monkeypatch, 1, err=" no: No solution found\n")
    with pytest.raises(CheckFailed, match=r"^no: No solution found$"):
        dependencies.resolve(platform, tmp_path)
    record(monkeypatch, 3, err="error: odd\n")
    with pytest.raises(EnvironmentProblem, match=r"^uv failed with exit code 3; its messages are above$"):
        dependencies.resolve(platform, tmp_path)
    assert capsys.readouterr().err == "error: odd\n"


@pytest.mark.parametrize(("said", "oldest"), [("", "3.10"), ("<4", "3.10"), (">=3.11,!=3.12.1,>=3.12", "3.11"), ("==3.9,>=3.12", "3.12")])
def test_the_oldest_python(said: str, oldest: str) -> None:
    assert dependencies.oldest_python(said) == oldest


def test_what_a_wheel_requires() -> None:
    from email import message_from_string

    metadata = message_from_string("Provides-Extra: a\nProvides-Extra: b\nRequires-Dist: x\nRequires-Dist: y; extra == 'a'\n\n")
    found = dependencies.of_wheel(metadata)
    assert {extra: [each.name for each in requirements] for extra, requirements in found.items()} == {"a": ["x", "y"], "b": ["x"]}
    assert dependencies.of_wheel(message_from_string("Provides-Extra: a\n\n")) == {"a": []}
    assert dependencies.of_wheel(message_from_string("Requires-Dist: x\n\n")) == {}


def test_the_command(ready: Gh, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("GITHUB_REF_NAME", "GITHUB_REF_TYPE"):
        monkeypatch.delenv(name, raising=False)
    arguments = ["release", "preflight", "--index", "pypi"]
    assert cli.main([*arguments, "--tag", f"v{VERSION}"]) == 0
    assert capsys.readouterr().out == f"version {VERSION} may be built\n"
    assert cli.main([*arguments, "--tag", "v1"]) == 1
    assert "error: this release cannot be published:\n  tag: the tag is v1" in capsys.readouterr().err
    monkeypatch.setenv("GITHUB_REF_NAME", f"v{VERSION}")
    assert cli.main(arguments) == 1, "that could be a branch's name"
    monkeypatch.setenv("GITHUB_REF_TYPE", "tag")
    assert cli.main(arguments) == 0
    assert cli.main(["release", "preflight", "--index", "none"]) == 0
