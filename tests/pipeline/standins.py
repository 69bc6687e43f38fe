"""What GitHub's own actions, and its command line, do on this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ci.toolkit import uv

if TYPE_CHECKING:
    from .runner import Action, Job


WHOLE = "whole"  # the branch with the whole matrix, which the tests are of
TESTED = {"platform/tests", "nightly/slow", "nightly/mutants", "wheels/lint"}


def checkout(job: Job, options: dict[str, Any]) -> None:
    """A clone at the commit: of one commit without tags, unless the step asks for all."""
    github = job.contexts["github"]
    source = job.machine.repository.as_uri()
    reference = options.get("ref") or github["ref"].removeprefix("refs/heads/").removeprefix("refs/tags/")
    reference = WHOLE if job.key in TESTED else reference
    depth = [] if options.get("fetch-depth") == 0 else ["--depth", "1"]
    subprocess.run(["git", "clone", "--quiet", *depth, "--branch", reference, source, str(job.workspace)], check=True, capture_output=True)


def setup_python(job: Job, options: dict[str, Any]) -> None:
    """These interpreters before PATH, the last one as `python`, in an environment of its own, as pip installs into it."""
    *others, last = options["python-version"].split()
    for version in others:
        if found := _interpreter(version):
            job.path.append(str(found.parent))
    folder = job.temporary / f"python-{last}"
    own = _interpreter(last)
    assert own, f"there is no CPython {last} here"
    subprocess.run([str(own), "-m", "venv", str(folder)], check=True)
    job.path[:0] = [str(folder / "bin")]
    job.path.append(str(own.parent))  # as uv passes over environments


def setup_uv(job: Job, options: dict[str, Any]) -> None:
    """An environment with uv, which is before PATH, and of which `uv pip install` knows."""
    setup_python(job, {"python-version": options["python-version"]})
    environment = job.temporary / f"python-{options['python-version']}"
    shutil.copy(uv.executable(), environment / "bin" / "uv")
    job.environment["VIRTUAL_ENV"] = str(environment)


def _interpreter(version: str) -> Path | None:
    return max(Path(os.environ["PIPELINE_PYTHONS"]).glob(f"{version}.*/bin/python"), default=None)


def upload(job: Job, options: dict[str, Any]) -> None:
    """Files by a pattern, or a folder's contents; several paths keep their places."""
    target = job.machine.folder / "artifacts" / options["name"]
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    patterns = options["path"].split()
    found = [path for pattern in patterns for path in sorted(job.workspace.glob(pattern))]
    if not found:
        raise FileNotFoundError(f"nothing to upload: {options['path']}")
    for path in found:
        place = target / (path.relative_to(job.workspace) if len(patterns) > 1 else path.name if path.is_file() else "")
        place.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            shutil.copytree(path, place, dirs_exist_ok=True)
        else:
            shutil.copy2(path, place)


def download(job: Job, options: dict[str, Any]) -> None:
    """One artifact by its name, or all that a pattern names into one folder."""
    target = job.workspace / options.get("path", ".")
    found = sorted((job.machine.folder / "artifacts").glob(options.get("name") or options["pattern"]))
    if not found:
        raise FileNotFoundError(f"no artifact {options}")
    for artifact in found:
        shutil.copytree(artifact, target, dirs_exist_ok=True)


def cache(_job: Job, _options: dict[str, Any]) -> None:
    """A first run finds nothing in it."""


def attest(job: Job, options: dict[str, Any]) -> None:
    if not list(job.workspace.glob(options["subject-path"])):
        raise FileNotFoundError(f"nothing to attest: {options['subject-path']}")


def upload_pages(job: Job, options: dict[str, Any]) -> None:
    upload(job, {"name": "github-pages", "path": options["path"]})


def deploy_pages(job: Job, _options: dict[str, Any]) -> None:
    """The site of the last deployment is what a server on this machine shows."""
    site = job.machine.folder / "pages"
    shutil.rmtree(site, ignore_errors=True)
    shutil.copytree(job.machine.folder / "artifacts" / "github-pages", site)


ACTIONS: dict[str, Action] = {
    "actions/attest": attest,
    "actions/cache": cache,
    "actions/checkout": checkout,
    "actions/deploy-pages": deploy_pages,
    "actions/download-artifact": download,
    "actions/setup-python": setup_python,
    "actions/upload-artifact": upload,
    "actions/upload-pages-artifact": upload_pages,
    "astral-sh/setup-uv": setup_uv,
}
