"""``python -m benchmarks.screenshots WHEEL`` takes the pictures of docs/factory: the wheel's report, the nightly index, and a trial.

docs/img/screenshots.toml says which wheel and commit they show. The wheel is one that `python -m ci wheel` built from this commit, with the
code of all GPUs. Install requirements/tests.txt and requirements/benchmarks.txt first. Chromium is the system's: no lock can pin it.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import os
import re
import shutil
import sys
import tempfile
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from subprocess import STDOUT
from typing import TYPE_CHECKING, Any

from ci import process
from ci.errors import CheckFailed, EnvironmentProblem, ending
from ci.matrix import REPOSITORY

from .platforms import load
from .table import fill_blocks

if TYPE_CHECKING:
    from collections.abc import Mapping

    from playwright.sync_api import Page

DOCUMENTS = tuple(REPOSITORY / "docs" / "factory" / name for name in ("report.md", "nightly.md", "overview.md"))
PICTURES = REPOSITORY / "docs" / "img"
RECORD = PICTURES / "screenshots.toml"
CHROMIUMS = ("chromium", "chromium-browser", "google-chrome", "chrome")
TERMINAL = {"COLUMNS": "88", "NO_COLOR": "1", "PYTHONIOENCODING": "utf-8"}  # as wide as a page of the documentation site
PROGRESS = re.compile(r"^(?:[.sx]+ +\[ *\d+%\]|SKIPPED .*|=+ short test summary info =+)\n", re.MULTILINE)


@dataclass(frozen=True)
class Picture:
    """The top of a page in a window of this size."""

    page: str
    title: str
    width: int
    height: int

    def take(self, tab: Page, page: Path, output: Path) -> None:
        """Write the picture; CheckFailed where the page is wider than the window."""
        from PIL import Image

        tab.set_viewport_size({"width": self.width, "height": self.height})
        tab.goto(page.as_uri())
        if (width := tab.evaluate("document.documentElement.scrollWidth")) > self.width:
            raise CheckFailed(
                f"the {self.page} is {width} px wide in a window of {self.width}\n  fix: its style in ci/report or ci/nightly"
            )
        Image.open(io.BytesIO(tab.screenshot())).convert("RGB").save(output, optimize=True)


TAKEN = {
    "report.png": Picture("report", "The head of a report, and which GPU gets which device code", 1280, 828),
    "report-phone.png": Picture("report", "The same report on a phone", 390, 844),
    "nightly.png": Picture("index", "The page of the nightly index, with the commands that install from it", 1280, 690),
}


def blocks(record: Mapping[str, Any]) -> dict[str, str]:
    """Return the blocks of the documents, each with the wheel and the commit."""
    of = f"the wheel of commit `{record['commit']}` ({record['size'] / 2**20:.1f} MiB)"
    images = {name: f"![{picture.title}](../img/{name})" for name, picture in TAKEN.items()}
    return {
        "report_pictures": f"{images['report.png']}\n\nThe report of {of}. On a phone:\n\n{images['report-phone.png']}",
        "nightly_picture": f"{images['nightly.png']}\n\nThe page with {of}, under the version that a nightly build would have.",
        "trial": f"A trial of {of}, without the lines of pytest's progress and skips:\n\n```console\n{record['trial']}```",
    }


def make_pages(wheel: Path, folder: Path) -> dict[str, Path]:
    """Write the pages; CheckFailed where the wheel is not of this checkout."""
    from ci.nightly import site
    from ci.nightly.wheels import Nightly
    from ci.release.version import development
    from ci.report import model, page

    report = model.make([wheel])
    if report.violations or report.unknown:
        raise CheckFailed(f"the audit refuses {wheel.name}\n  fix: python -m ci wheel in this checkout, and give that wheel")
    (folder / "report.html").write_text(page.render(report), "utf-8")
    contents = report.wheels[0].contents
    version = development(REPOSITORY)
    name = wheel.name.replace(wheel.name.split("-")[1], str(version))
    nightly = Nightly(name, version, contents.slot.platform, contents.size, "", b"", "")
    site.wheels(folder / "site").mkdir(parents=True)
    site.write(folder / "site", [nightly], "https://OWNER.github.io/REPOSITORY", docs=True)
    return {"report": folder / "report.html", "index": folder / "site" / "index.html"}


def take(pages: Mapping[str, Path], program: str) -> None:
    """Take all pictures, in light mode."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as running, running.chromium.launch(executable_path=program) as browser:
        tab = browser.new_page(color_scheme="light")
        for name, picture in TAKEN.items():
            picture.take(tab, pages[picture.page], PICTURES / name)


def trial(wheel: Path) -> str:
    """Return the output of `ci try` without the progress of pytest; CheckFailed where the wheel does not work."""
    command = [sys.executable, "-m", "ci", "try", str(wheel)]
    env = {name: value for name, value in os.environ.items() if name not in {"FORCE_COLOR", "PY_COLORS"}} | TERMINAL
    done = process.run(command, cwd=REPOSITORY, env=env, stderr=STDOUT)
    if done.returncode:
        raise CheckFailed(f"{done.stdout}\n{wheel.name} does not work here\n  fix: the failure that python -m ci try printed above")
    return f"$ python -m ci try wheelhouse/{wheel.name}\n{PROGRESS.sub('', done.stdout)}"


def find_chromium(given: str | None) -> str:
    found = next(filter(None, map(shutil.which, [given] if given else CHROMIUMS)), None)
    if not found:
        fix = "install one (Debian: apt-get install chromium), or name it by --chromium"
        raise EnvironmentProblem(f"{given or 'Chromium'} is not installed", fix=fix)
    return found


def templates() -> str:
    """Return the digest of the templates of the pages."""
    files = [*(REPOSITORY / "ci" / "report" / "templates").iterdir(), *(REPOSITORY / "ci" / "nightly" / "templates").iterdir()]
    return hashlib.sha256(b"".join(file.read_bytes() for file in sorted(files) if file.is_file())).hexdigest()


def run(wheel: Path, program: str) -> int:
    if process.git("status", "--porcelain", cwd=REPOSITORY, fix="run it in a checkout").strip():
        raise EnvironmentProblem("the checkout has changes, so no commit would name what the pictures show", fix="commit them first")
    commit = process.git("rev-parse", "--short=7", "HEAD", cwd=REPOSITORY, fix="run it in a checkout").strip()
    with tempfile.TemporaryDirectory() as folder:
        pages, said = make_pages(wheel, Path(folder)), trial(wheel)
        take(pages, program)
    lines = ["# Written by `python -m benchmarks.screenshots`.", f'commit = "{commit}"', f"date = {datetime.now(timezone.utc).date()}"]
    lines += [f'wheel = "{wheel.name}"', f"size = {wheel.stat().st_size}", f'templates = "{templates()}"', f"trial = '''\n{said}'''\n"]
    RECORD.write_text("\n".join(lines), "utf-8")
    for document in DOCUMENTS:
        document.write_text(fill_blocks(document.read_text("utf-8"), blocks(load(RECORD))), "utf-8")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.screenshots", description=__doc__)
    parser.add_argument("wheel", type=Path, metavar="WHEEL", help="a repaired wheel of this commit, with the code of all GPUs")
    parser.add_argument("--chromium", metavar="PROGRAM", help=f"the browser (default: the first of {', '.join(CHROMIUMS)} on PATH)")
    args = parser.parse_args()
    return run(args.wheel.resolve(), find_chromium(args.chromium))


if __name__ == "__main__":
    sys.exit(ending(main))
