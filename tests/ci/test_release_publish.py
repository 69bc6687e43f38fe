"""Publishing to a real index server with real twine, and what goes wrong on the way."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from packaging.version import Version

from ci import __main__ as cli
from ci.errors import CheckFailed, EnvironmentProblem
from ci.files import sha256
from ci.matrix import REPOSITORY
from ci.release.dist import ATTESTATION, MANIFEST, Dist, complete, read_manifest, settle
from ci.release.publish import publish
from ci.release.upload import sign
from ci.toolkit import uv

from . import index_support
from .faults_support import FAULTS, LIMITS, Outcome, play
from .release_support import MATRIX, VERSION, make_dist, twine_in_this_process, write_wheel

OLDER = f"{MATRIX.mlx}.6"
HERE = MATRIX.platforms["linux-x86_64"]
LONG = pytest.mark.slow if os.environ.get("MLX_CUDA_RELEASE") else pytest.mark.nightly  # a release leaves nothing to the night


@pytest.fixture
def dist(tmp_path: Path) -> Dist:
    return complete(make_dist(tmp_path / "dist"))


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def proxy(store: Path) -> Iterator[index_support.Proxy]:
    with index_support.server_here(store) as url, index_support.proxy(url) as state:
        yield state


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory, at_night: bool) -> Callable[[str], Outcome]:
    """Plays a fault, with small wheels or with those of MLX_CUDA_RELEASE: a release plays them with the files that will go.

    By day runs are killed for the last two files only, and else for each.
    """
    if sys.platform == "win32":
        pytest.skip("process groups are killed by POSIX signals")
    folder = tmp_path_factory.mktemp("faults")
    given = os.environ.get("MLX_CUDA_RELEASE")
    dist = complete(Path(given) if given else make_dist(folder / "dist"))
    kills = len(dist.entries) if given or at_night else 2
    return lambda fault: play(fault, dist, folder / str(list(FAULTS).index(fault)), kills)


@pytest.mark.parametrize("fault", [pytest.param(each, marks=LONG if each.startswith("no answer ever") else ()) for each in FAULTS])
def test_fault(played: Callable[[str], Outcome], fault: str) -> None:
    outcome = played(fault)
    assert outcome.sound, outcome.happened
    assert outcome.lost == 0


@pytest.mark.usefixtures("twine_here")
def test_what_is_downloaded_is_what_was_published(dist: Dist, proxy: index_support.Proxy, tmp_path: Path) -> None:
    index = index_support.index(proxy.url)
    before = sorted(dist.folder.iterdir())
    settle(dist, tmp_path / "release.json")
    publish(dist, index, manifest_path=tmp_path / "release.json", limits=LIMITS, tags=())
    fetched = [index.fetch(remote, tmp_path / "downloaded") for remote in index.files(MATRIX.name)]
    assert {path.name: path.read_bytes() for path in fetched} == {path.name: path.read_bytes() for path in dist.paths}
    assert sorted(dist.folder.iterdir()) == before, "the manifest went where it was told to"


def test_twine_in_this_process_leaves_its_logging_alone(tmp_path: Path) -> None:
    root, handler = logging.getLogger(), logging.NullHandler()
    root.addHandler(handler)
    try:
        before = root.handlers[:], root.level
        command = [sys.executable, "-m", "twine", "check", str(tmp_path / "none.whl")]
        assert twine_in_this_process(command, env=dict(os.environ)).returncode == 1
        assert (root.handlers, root.level) == before
    finally:
        root.removeHandler(handler)


def test_a_dry_run_leaves_nothing(dist: Dist, proxy: index_support.Proxy, store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["release", "publish", str(dist.folder), "--index", proxy.url, "--dry-run"]) == 0
    said = capsys.readouterr()
    assert [line.split(":")[0] for line in said.err.splitlines()] == [entry.name for entry in dist.entries]
    assert f"{len(dist.entries)} of {len(dist.entries)} wheels would be uploaded" in said.out
    assert proxy.uploads == 0
    assert not list(store.iterdir())
    assert not (dist.folder / MANIFEST).exists()


@pytest.mark.parametrize("named", [True, False])
def test_a_manifest_that_was_exchanged_is_refused(dist: Dist, proxy: index_support.Proxy, tmp_path: Path, named: bool) -> None:
    """By its digest, which came another way; an empty one is none."""
    manifest = tmp_path / "release.json"
    settle(dist, manifest)
    command = ["release", "publish", str(dist.folder), "--index", proxy.url, "--dry-run", *(["--manifest", str(manifest)] if named else [])]
    for digest in ("", "0" * 64):
        assert cli.main([*command, "--sha256", digest]) == (1 if named else 2)
    assert proxy.seen == []
    if named:
        assert cli.main([*command, "--sha256", sha256(manifest)]) == 0


def test_a_manifest_that_is_named_has_to_be_there(dist: Dist, proxy: index_support.Proxy, tmp_path: Path) -> None:
    """What a workflow uploads is what was checked, or nothing."""
    for dry_run in (True, False):
        with pytest.raises(EnvironmentProblem, match=r"cannot read .*missing\.json"):
            publish(dist, index_support.index(proxy.url), manifest_path=tmp_path / "missing.json", dry_run=dry_run, limits=LIMITS, tags=())
    assert proxy.seen == []


@pytest.mark.usefixtures("twine_here")
def test_what_was_checked_is_not_asked_again(tmp_path: Path, proxy: index_support.Proxy, store: Path) -> None:
    """Whose the name is, only a clone with all tags can tell; the job that may sign has none. What an index never gets it is not sent."""
    make_dist(store, OLDER)
    index = replace(index_support.index(proxy.url), rehearsals=False)
    for version, code in ((VERSION, None), (f"{VERSION}.dev1", CheckFailed)):
        dist, manifest = complete(make_dist(tmp_path / version, version)), tmp_path / f"{version}.json"
        settle(dist, manifest)
        if code:
            with pytest.raises(code, match="is a development version"):
                publish(dist, index, manifest_path=manifest, limits=LIMITS, tags=())
        else:
            with pytest.raises(CheckFailed, match="owner"):
                publish(dist, index, dry_run=True, limits=LIMITS, tags=())
            publish(dist, index, manifest_path=manifest, limits=LIMITS, tags=())
    assert proxy.uploads == len(dist.entries)


@pytest.mark.parametrize("dry_run", [True, False])
def test_other_wheels_than_the_manifests(dist: Dist, proxy: index_support.Proxy, dry_run: bool) -> None:
    settle(dist, dist.folder / MANIFEST)
    write_wheel(dist.paths[0], changes={"licenses/LICENSE": "another\n"})
    with pytest.raises(CheckFailed, match=f"the manifest of version [^:]*: {dist.entries[0].name}"):
        publish(complete(dist.folder), index_support.index(proxy.url), dry_run=dry_run, limits=LIMITS, tags=())
    assert proxy.seen == []


@LONG
def test_a_rehearsal(tmp_path: Path, store: Path) -> None:
    """A release's own wheels go to an index on this machine and are installed from there: those of MLX_CUDA_RELEASE, or small ones."""
    given = os.environ.get("MLX_CUDA_RELEASE")
    folder = Path(given) if given else make_dist(tmp_path / "dist", f"{VERSION}.dev202601020304")
    dist, manifest = complete(folder), tmp_path / "release.json"
    settle(dist, manifest)
    with index_support.server(store) as url:
        publish(dist, index_support.index(url), manifest_path=manifest, limits=replace(LIMITS, upload=120), tags=())
        assert len(index_support.held(store)) == len(dist.entries)
        assert (
            cli.main(["release", "verify", str(dist.version), "--index", url, "--manifest", str(manifest), "--python", sys.executable]) == 0
        )


def test_what_publishes_runs_next_to_nothing(dist: Dist, tmp_path: Path) -> None:
    """The job that may sign imports no part of the factory that reads binaries or runs wheels, and no library but the index's clients."""
    program = "import runpy, sys, atexit; atexit.register(lambda: print(*sorted(sys.modules))); runpy.run_module('ci', run_name='__main__')"
    with index_support.server(tmp_path / "store") as url:
        command = [sys.executable, "-c", program, "release", "publish", str(dist.folder), "--index", url, "--dry-run"]
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    names = done.stdout.splitlines()[-1].split()
    ours = {"audit", "console", "errors", "files", "index", "matrix", "process", "release"}
    assert {name.split(".")[1] for name in names if name.startswith("ci.") and name != "ci.__main__"} == ours
    release = {"dist", "publish", "standing", "upload", "version"}
    assert {name.split(".")[2] for name in names if name.startswith("ci.release.")} == release
    assert not [name for name in names if name.startswith("ci.audit.")]
    assert not {"auditwheel", "cyclonedx", "delvewheel", "elftools", "jinja2", "pefile", "rich", "tomlkit", "uv"} & set(names)


@pytest.mark.usefixtures("twine_here")
def test_the_manifest_is_there_before_the_first_byte(dist: Dist, proxy: index_support.Proxy) -> None:
    seen = []

    def look(method: str) -> None:
        if method == "POST":
            seen.append((dist.folder / MANIFEST).is_file())

    proxy.fault = look
    publish(dist, index_support.index(proxy.url), limits=LIMITS, tags=())
    assert seen == [True] * len(dist.entries)
    assert read_manifest(dist.folder / MANIFEST)[1] == dist.entries


@pytest.mark.usefixtures("twine_here")
def test_a_setting_of_the_shell_does_not_send_the_files_elsewhere(
    dist: Dist, proxy: index_support.Proxy, store: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """twine takes a URL of the environment before the name that it is called with."""
    (tmp_path / "pypirc").write_text(f"[distutils]\nindex-servers = ours\n[ours]\nrepository = {proxy.url}\nusername = u\npassword = p\n")
    monkeypatch.setenv("TWINE_REPOSITORY_URL", "http://127.0.0.1:9/")
    target = ("--repository", "ours", "--config-file", str(tmp_path / "pypirc"))
    publish(dist, replace(index_support.index(proxy.url), target=target), limits=LIMITS, tags=())
    assert len(index_support.held(store)) == len(dist.entries)


@pytest.mark.usefixtures("twine_here")
@pytest.mark.parametrize(
    ("status", "error", "said"),
    [
        ("403", EnvironmentProblem, "check the credentials"),
        ("400", CheckFailed, "refuses mlx_cuda"),
    ],
)
def test_what_is_refused_is_not_tried_again(
    dist: Dist, proxy: index_support.Proxy, status: index_support.Fault, error: type[Exception], said: str
) -> None:
    proxy.fault = lambda method: status if method == "POST" else None
    with pytest.raises(error, match=said):
        publish(dist, index_support.index(proxy.url), limits=LIMITS, tags=())
    assert proxy.uploads == 1


def test_without_credentials(dist: Dist, proxy: index_support.Proxy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("TWINE_USERNAME", "TWINE_PASSWORD"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PYTHON_KEYRING_BACKEND", "keyring.backends.null.Keyring")
    index = index_support.index(proxy.url)
    with pytest.raises(EnvironmentProblem, match="set TWINE_USERNAME and TWINE_PASSWORD"):
        publish(dist, replace(index, target=index.target[:2]), limits=LIMITS, tags=())
    assert proxy.uploads == 0


@pytest.mark.usefixtures("twine_here")
def test_a_file_that_does_not_show(dist: Dist, proxy: index_support.Proxy) -> None:
    """The next file goes only when the one before is seen: a page that lags behind, or a server that loses what it took."""
    proxy.fault = lambda method: "404" if method == "GET" and proxy.uploads else None
    with pytest.raises(EnvironmentProblem, match=r"took .* but does not show it after 1 s"):
        publish(dist, index_support.index(proxy.url), limits=replace(LIMITS, listed=1), tags=())
    assert proxy.uploads == 1
    proxy.fault = lambda _: None
    assert len(publish(dist, index_support.index(proxy.url), limits=LIMITS, tags=()).missing) == len(dist.entries) - 1


@pytest.mark.usefixtures("twine_here")
def test_a_page_that_lags_behind(dist: Dist, proxy: index_support.Proxy, store: Path) -> None:
    """It is asked again until the file shows, and nothing is sent twice."""
    for entry in dist.entries[1:]:
        shutil.copy(dist.folder / entry.name, store)

    def lag(method: str) -> index_support.Fault | None:
        return "404" if method == "GET" and proxy.uploads and proxy.seen[proxy.seen.index("POST") :].count("GET") < 3 else None

    proxy.fault = lag
    publish(dist, index_support.index(proxy.url), limits=LIMITS, tags=())
    assert proxy.uploads == 1


@pytest.mark.usefixtures("twine_here")
def test_an_answer_that_is_lost_before_a_page_that_lags_behind(dist: Dist, proxy: index_support.Proxy, store: Path) -> None:
    """The second attempt is told that the file is there already: the page is waited for, and has the last word."""
    for entry in dist.entries[1:]:
        shutil.copy(dist.folder / entry.name, store)

    def fault(method: str) -> index_support.Fault | None:
        if method == "POST":
            return "no-answer" if proxy.uploads == 1 else None
        return "404" if proxy.uploads == 1 or (proxy.uploads and proxy.seen[::-1].index("POST") < 3) else None

    proxy.fault = fault
    publish(dist, index_support.index(proxy.url), limits=LIMITS, tags=())
    assert proxy.uploads == 2


@pytest.mark.usefixtures("twine_here")
def test_a_wheel_that_changes_on_its_way(dist: Dist, proxy: index_support.Proxy, store: Path) -> None:
    """It is compared with the manifest when its turn comes, not only at the start."""
    last = dist.folder / dist.entries[-1].name

    def damage(method: str) -> None:
        if method == "POST":
            last.write_bytes(b"damaged")

    proxy.then = damage
    with pytest.raises(CheckFailed, match="was changed during the upload"):
        publish(dist, index_support.index(proxy.url), limits=LIMITS, tags=())
    assert last.name not in index_support.held(store)


def test_attestations_need_an_identity(dist: Dist, proxy: index_support.Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GITHUB_ACTIONS", "GITLAB_CI", "BUILDKITE", "CIRCLECI", "ACTIONS_ID_TOKEN_REQUEST_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "")
    index = index_support.index(proxy.url)
    with pytest.raises(EnvironmentProblem, match="no identity to sign with"):
        publish(dist, index, limits=LIMITS, tags=(), attestations=True)
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    with pytest.raises(EnvironmentProblem, match="id-token: write"):
        publish(dist, index, limits=LIMITS, tags=(), attestations=True)
    assert proxy.uploads == 0


def test_attestations_that_are_there_are_not_made_again(dist: Dist) -> None:
    for path in dist.paths:
        path.with_name(path.name + ATTESTATION).write_text("{}")
    sign(dist.paths)
    assert complete(dist.folder).entries == dist.entries, "attestations lie beside the wheels"


def resolved(url: str, platform: str, folder: Path) -> str:
    """The version that uv finds for a platform."""
    command = [uv.executable(), "pip", "compile", "--quiet", "--no-config", "--no-header", "--no-annotate", "--no-cache", "--no-build"]
    command += [
        "--default-index",
        f"{url}simple/",
        "--python",
        sys.executable,
        "--python-version",
        "3.12",
        "--python-platform",
        platform,
        "-",
    ]
    done = subprocess.run(command, input=MATRIX.name, check=True, capture_output=True, text=True, cwd=folder)
    return done.stdout.strip().partition("==")[2]


def downloaded(url: str, folder: Path) -> str:
    """The version that pip finds here."""
    command = [sys.executable, "-m", "pip", "--isolated", "--no-input", "download", "--quiet", "--no-deps", "--no-cache-dir"]
    command += ["--only-binary", ":all:", "--platform", HERE.tag, "--python-version", "3.12", "--index-url", f"{url}simple/"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")} | {"PIP_CONFIG_FILE": os.devnull}
    subprocess.run([*command, "--dest", str(folder), MATRIX.name], check=True, capture_output=True, env=environment)
    (path,) = folder.iterdir()
    return path.name.split("-")[1]


@pytest.mark.nightly
@pytest.mark.usefixtures("twine_here")
def test_nobody_gets_half_a_release(dist: Dist, proxy: index_support.Proxy, store: Path, tmp_path: Path) -> None:
    """After each upload a platform has the new wheel, or still gets the release before; the most used one changes last."""
    make_dist(store, OLDER)
    platforms = {platform.name: platform.uv for platform in MATRIX.platforms.values()}
    seen: list[tuple[set[str], set[str], str]] = []

    def look(method: str) -> None:
        if method == "POST":
            held = index_support.held(store)
            there = {entry.platform for entry in dist.entries if entry.name in held and entry.build == MATRIX.builds[0].abi}
            new = {name for name, platform in platforms.items() if resolved(proxy.target, platform, tmp_path) == VERSION}
            seen.append((there, new, downloaded(proxy.target, tmp_path / f"pip-{len(seen)}")))

    proxy.then = look
    publish(dist, index_support.index(proxy.url), limits=replace(LIMITS, upload=120), tags=[Version(OLDER)])
    assert [new for _, new, _ in seen] == [there for there, _, _ in seen]
    assert seen[0][1] == set()
    assert seen[-1][1] == set(platforms)
    assert [version for _, _, version in seen] == [*[OLDER] * (len(dist.entries) - 1), VERSION]


def test_a_fault_that_loses_a_file_is_told(dist: Dist, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The faults are worth something only if they can show a loss."""

    def lose(stage: object) -> str:
        shutil.copy(dist.paths[0], tmp_path / "0" / "store")
        return "all but one forgotten"

    monkeypatch.setitem(FAULTS, "a careless server", lose)
    outcome = play("a careless server", dist, tmp_path / "0", kills=0)
    assert outcome == Outcome("a careless server", "all but one forgotten", len(dist.entries) - 1, sound=False)
