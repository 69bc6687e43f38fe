"""The tools' locks: in step with pyproject.toml, whole for every CPython and platform, and one version of a package in all of them."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from ci import matrix
from ci.errors import EnvironmentProblem
from ci.files import tomllib
from ci.maintain import tools
from ci.toolkit import roots, uv

PROJECT = (matrix.REPOSITORY / "pyproject.toml").read_text("utf-8")
GROUPS = tools.groups(PROJECT)
FILES = {path.stem: text for path, text in tools.read(matrix.REPOSITORY).items()}
SYSTEMS = ({"sys_platform": "linux", "platform_system": "Linux"}, {"sys_platform": "win32", "platform_system": "Windows"})
CPYTHONS = [f"3.{minor}" for minor in range(10, 16)]
ENVIRONMENTS = [
    {**system, "platform_machine": machine, "python_version": version, "python_full_version": f"{version}.{patch}"}
    for system, machine, version, patch in itertools.product(SYSTEMS, ("x86_64", "AMD64", "aarch64"), CPYTHONS, (0, 20))
]


def applies(requirement: Requirement, environment: dict[str, str]) -> bool:
    return requirement.marker is None or requirement.marker.evaluate(environment)


@cache
def pins(group: str) -> list[Requirement]:
    return tools.pins(FILES[group])


@cache
def installed(group: str, number: int) -> dict[str, str]:
    """What a group's file installs in an environment: names and versions; never two versions of a name."""
    found = [pin for pin in pins(group) if applies(pin, ENVIRONMENTS[number])]
    assert len({pin.name for pin in found}) == len(found), (group, ENVIRONMENTS[number])
    return {pin.name: str(pin.specifier).removeprefix("==") for pin in found}


def test_every_group_has_its_file() -> None:
    assert FILES.keys() == GROUPS.keys()
    assert {path.name for path in (matrix.REPOSITORY / tools.FOLDER).iterdir()} == {f"{group}.txt" for group in GROUPS}


@pytest.mark.parametrize("group", GROUPS)
def test_a_file_says_what_it_was_made_from_and_that_is_what_the_group_says(group: str) -> None:
    assert FILES[group].startswith(tools.head(group, GROUPS[group])), "fix: python -m ci bump --tools"


@pytest.mark.parametrize("group", GROUPS)
def test_what_a_group_asks_for_is_pinned_in_every_environment(group: str) -> None:
    for number, environment in enumerate(ENVIRONMENTS):
        found = installed(group, number)
        for each in map(Requirement, GROUPS[group]):
            if applies(each, environment):
                assert each.specifier.contains(found[each.name.lower()]), (each, environment)


@pytest.mark.parametrize("group", GROUPS)
def test_a_file_holds_pins_with_hashes_and_nothing_else(group: str) -> None:
    body = FILES[group].removeprefix(tools.head(group, GROUPS[group]))
    hashes = r"(?:    --hash=sha256:[0-9a-f]{64} \\\n)*    --hash=sha256:[0-9a-f]{64}\n"
    blocks = re.findall(rf"^(?:\S+==\S+(?: ; .+)? \\\n{hashes}|    #.*\n)", body, re.MULTILINE)
    assert "".join(blocks) == body
    assert len(pins(group)) == sum("--hash" in block for block in blocks)


@pytest.mark.parametrize("group", GROUPS)
def test_nothing_is_pinned_that_nothing_asks_for(group: str) -> None:
    """uv writes below each pin what brought it in; only what the group names itself has nothing there, or more."""
    asked = {Requirement(each).name.lower() for each in GROUPS[group]}
    names = {pin.name for pin in pins(group)}
    for pin, comment in re.findall(r"^(\S+)==.*\n(?:    --hash.*\n)+((?:    #.*\n)*)", FILES[group], re.MULTILINE):
        reasons = set(re.findall(r"[\w-]+", comment)) - {"via"}
        assert pin in asked or reasons, pin
        assert reasons <= names, pin


def test_no_file_names_an_index() -> None:
    assert not [group for group, text in FILES.items() if "://" in text or "-index" in text]


def test_a_package_is_the_same_in_all_files() -> None:
    """So that several of them can be installed together."""
    for number, environment in enumerate(ENVIRONMENTS):
        found: dict[str, set[str]] = {}
        for group in GROUPS:
            for name, version in installed(group, number).items():
                found.setdefault(name, set()).add(version)
        assert not {name: versions for name, versions in found.items() if len(versions) > 1}, environment


def test_a_build_without_isolation_has_what_the_build_system_requires() -> None:
    required = list(map(Requirement, tomllib.loads(PROJECT)["build-system"]["requires"]))
    given = {each.name: each for each in map(Requirement, GROUPS["build"])}
    for each in required:
        own = given[each.name]
        assert (own.marker, own.extras) == (each.marker, each.extras)
        assert own.specifier == each.specifier or each.specifier == SpecifierSet()
    options = tomllib.loads(PROJECT)["tool"]["cibuildwheel"]
    assert options["build-frontend"] == {"name": "build", "args": ["--no-isolation"]}
    assert options["before-build"] == "python -m pip install --require-hashes -r {project}/requirements/build.txt"


SMALL = """
[project]
requires-python = ">=3.10"
[dependency-groups]
one = ["Alpha>=1"]
both = [{ include-group = "one" }, "alpha >= 1", "beta; python_version < '3.11'"]
"""


def test_a_project_without_groups() -> None:
    with pytest.raises(EnvironmentProblem, match=r"^pyproject\.toml has no \[dependency-groups\]\n  fix: "):
        tools.groups("[project]\n")


def test_groups_with_what_they_include() -> None:
    assert tools.groups(SMALL) == {"one": ("Alpha>=1",), "both": ("Alpha>=1", "alpha>=1", 'beta; python_version < "3.11"')}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """uv's arguments, as it is called; instead of resolving, its first call is answered by what it was given."""
    calls: list[tuple[str, ...]] = []

    def run(*arguments: str, cwd: Path) -> None:
        calls.append(arguments)
        if arguments[0] == "lock":
            calls.append(((cwd / "pyproject.toml").read_text("utf-8"),))
        else:
            (cwd / arguments[-1]).write_text("alpha==1.5 \\\n    --hash=sha256:0\n", "utf-8")

    monkeypatch.setattr(uv, "run", run)
    return calls


def test_all_groups_are_resolved_at_once_and_each_has_its_part(asked: list[tuple[str, ...]]) -> None:
    files = tools.resolve(SMALL)
    lock, (document,), *exports = asked
    project = tomllib.loads(document)
    assert project["dependency-groups"] == {name: list(requirements) for name, requirements in tools.groups(SMALL).items()}
    assert project["project"]["requires-python"] == ">=3.10"
    assert "--no-build" in lock, "it would run what a stranger wrote"
    assert [call[call.index("--only-group") + 1] for call in exports] == ["one", "both"]
    assert all("--frozen" in call for call in exports)
    assert files == {
        Path("requirements/one.txt"): "# Written by `python -m ci bump --tools`, with uv. For uv, or pip 23.3 or newer. "
        "The dependency group `one` of pyproject.toml:\n"
        "#   Alpha>=1\n--only-binary :all:\n\nalpha==1.5 \\\n    --hash=sha256:0\n",
        Path("requirements/both.txt"): tools.head("both", tools.groups(SMALL)["both"]) + "alpha==1.5 \\\n    --hash=sha256:0\n",
    }


def test_the_newest_are_a_week_old_but_for_mlx(asked: list[tuple[str, ...]]) -> None:
    tools.resolve(SMALL)
    words = " ".join(asked[0])
    assert "--exclude-newer 7 days" in words
    assert re.findall(r"--exclude-newer-package (\S+)", words) == ["mlx=false", "mlx-cpu=false", "mlx-metal=false"]
    assert tomllib.loads(asked[1][0])["tool"]["uv"]["constraint-dependencies"] == []


def test_what_is_kept_is_kept_whatever_its_age(asked: list[tuple[str, ...]]) -> None:
    tools.resolve(SMALL, [Requirement("b==1; python_version < '3.11'"), Requirement("a==2"), Requirement("a==2")])
    assert "--exclude-newer" not in asked[0]
    assert tomllib.loads(asked[1][0])["tool"]["uv"]["constraint-dependencies"] == ["a==2", 'b==1; python_version < "3.11"']


def test_pins_are_read_with_their_markers() -> None:
    text = "# a==1 \\\nb==2 ; python_full_version < '3.11' \\\n    --hash=sha256:0\nb==3 \\\n    --hash=sha256:1\n    # via c==4\n"
    assert list(map(str, tools.pins(text))) == ['b==2; python_full_version < "3.11"', "b==3"]


def test_what_moves() -> None:
    before = ["a==1.9 \\\nb==1 ; x \\\nc==1 \\\n".replace(" ; x", " ; os_name == 'nt'"), "d==1 \\\n"]
    after = ["a==1.10 \\\na==1.9 \\\nb==1 \\\n", "d==1 \\\ne==2 \\\n"]
    assert tools.moved(before, after) == ["a 1.9 -> 1.9, 1.10", "c 1 -> none", "e none -> 2"]
    assert tools.moved(before, before) == []


@pytest.mark.parametrize(
    ("old", "new", "stays"),
    [
        ("", "", True),
        ("a==1 ; os_name != 'nt' \\", "a==1 ; sys_platform == 'linux' \\", True),  # as another uv words it
        ("    --hash=sha256:0a", "    --hash=sha256:0a \\\n    --hash=sha256:0b", True),  # a wheel was added to the release
        ("    --hash=sha256:0a", "    --hash=sha256:0b", False),
        ("a==1 \\", "a==2 \\", False),
        ("a==1 \\", "a==1 \\\nb==1 \\", False),
    ],
)
def test_what_calls_for_another_file(old: str, new: str, stays: bool) -> None:
    head = tools.head("lint", ["a"])
    assert tools.holds(head + old, head + new) is stays
    assert not tools.holds(head + old, tools.head("lint", ["a>=1"]) + old)


@pytest.mark.nightly
@pytest.mark.slow
def test_the_index_has_what_is_pinned() -> None:
    """Resolved again with these pins nothing moves."""
    kept = [pin for group in GROUPS for pin in pins(group)]
    again = {path.stem: text for path, text in tools.resolve(PROJECT, kept).items()}
    for group, text in FILES.items():
        assert tools.holds(text, again[group]), group


WITHOUT_WHEELS = {
    (group, "3.15") for group in ("tests", "upstream-tests", "docs", "lint", "mutants", "models")
}  # they run on one CPython, which need not be the newest


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_there_are_wheels_for_every_platform_and_cpython(group: str, tmp_path: Path, at_night: bool) -> None:
    """Of the oldest and the newest CPython; at night (``--place nightly``) of those between, too, as the index answers slowly."""
    file = str(matrix.REPOSITORY / tools.FOLDER / f"{group}.txt")
    versions = [version for version in CPYTHONS if (group, version) not in WITHOUT_WHEELS]
    if not at_night:
        versions = [versions[0], versions[-1]]
    for platform, version in itertools.product(matrix.load().platforms.values(), versions):
        there = ["--target", str(tmp_path), "--python-platform", platform.uv, "--python-version", version]
        command = [uv.executable(), "pip", "install", "--dry-run", "--quiet", "--require-hashes", *there, "-r", file]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (platform.name, version, done.stderr)


@pytest.fixture(scope="module")
def pip(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Resolve files together with a pip of a version, and install nothing."""
    folder = tmp_path_factory.mktemp("pips")

    def run(version: str, *files: Path) -> subprocess.CompletedProcess[str]:
        python = folder / version / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
        if not python.exists():
            installs = ["pip", "install", "--quiet", "--python", str(python), f"pip=={version}"]
            for words in (["venv", "--quiet", "--python", "3.11", str(folder / version)], installs):
                subprocess.run([uv.executable(), *words], check=True, capture_output=True)
        command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--dry-run", "--require-hashes"]
        command += [word for file in files for word in ("-r", str(file))]
        return subprocess.run(command, check=False, capture_output=True, encoding="utf-8", errors="replace")

    return run


@pytest.mark.nightly
@pytest.mark.slow
def test_the_oldest_pip_reads_the_files(pip: Callable[..., subprocess.CompletedProcess[str]], at_night: bool) -> None:
    """At night (``--place nightly``) each by itself; else all at once, as most packages are in several."""
    files = [matrix.REPOSITORY / tools.FOLDER / f"{group}.txt" for group in GROUPS]
    for each in [[file] for file in files] if at_night else [files]:
        done = pip(tools.OLDEST_PIP, *each)
        assert done.returncode == 0, (each, done.stderr)


@pytest.mark.nightly
@pytest.mark.slow
def test_an_older_pip_does_not(pip: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    """Once one does, what is said of the oldest is too strict."""
    done = pip("23.2.1", matrix.REPOSITORY / tools.FOLDER / "publish.txt")
    assert "must have their versions pinned with ==" in done.stderr


@pytest.mark.nightly
@pytest.mark.slow
def test_the_oldest_pip_reads_the_lock_of_a_toolkit(pip: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = pip(tools.OLDEST_PIP, roots.find("cudnn-frontend").lock_file)
    assert done.returncode == 0, done.stderr


def test_documents_say_which_pip() -> None:
    for name in ("CONTRIBUTING.md", "docs/factory/toolkits.md"):
        found = re.findall(r"\bpip (\d+\.\d+)\b", (matrix.REPOSITORY / name).read_text("utf-8"))
        assert found == [tools.OLDEST_PIP], name
