"""The page and the command: asks nothing of a network, shows what wheels say as text, is never half written."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from ci import __main__ as cli
from ci.report.model import Report, make
from ci.report.page import render

from ..audit_support import (
    NAMES,
)


class Reader(HTMLParser):
    """What a browser would see: tags, ids, links; asserts that all that is opened is closed."""

    VOID = frozenset({"meta", "link", "br", "img", "input"})

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def values(self, attribute: str) -> list[str]:
        return [attributes[attribute] or "" for _, attributes in self.tags if attribute in attributes]


def test_what_wheels_say_stays_text(everything: Report) -> None:
    html = render(everything)
    tags = {tag for tag, _ in Reader(html).tags}
    assert not tags & {"script", "img", "iframe", "object", "form", "input", "base"}
    assert "<b>bold" not in html
    assert "<i>italic" not in html
    assert "&lt;script&gt;alert(1)&lt;/script&gt;\\u202e\\x1b[2J.py" in html
    assert all(character.isprintable() or character == "\n" for character in html)


def test_a_project_without_device_code(everything: Report) -> None:
    assert "GPU architectures</dt>" in render(everything)
    assert "GPU architectures</dt>" not in render(replace(everything, architectures=0))


def test_the_page_is_self_contained(everything: Report) -> None:
    html = render(everything)
    reader = Reader(html)
    assert reader.values("src") == reader.values("srcset") == reader.values("xlink:href") == []
    links = reader.values("href")
    assert [link for link in links if not link.startswith("#")] == ["data:,"]
    ids = reader.values("id")
    assert len(set(ids)) == len(ids)
    assert {link.removeprefix("#") for link in links} - {"data:,"} <= set(ids)
    assert {each for value in reader.values("aria-labelledby") for each in value.split()} <= set(ids)
    assert not re.search(r"url\(|@import|https?:|\bon\w+=", re.sub(r"<(?:li|td|th)\b.*?</(?:li|td|th)>|title=\"[^\"]*\"", "", html))
    assert "default-src 'none'" in html


def test_the_page_can_be_read_aloud(everything: Report) -> None:
    html = render(everything)
    reader = Reader(html)
    tags = [tag for tag, _ in reader.tags]
    assert tags.count("table") == tags.count("caption")
    assert tags.count("h1") == 1
    assert dict(reader.tags)["html"] == {"lang": "en"}
    assert all("scope" in attributes for tag, attributes in reader.tags if tag == "th")
    assert all(
        "aria-hidden" in attributes or {"role", "aria-labelledby"} <= attributes.keys() for tag, attributes in reader.tags if tag == "svg"
    )


def test_the_same_wheels_give_the_same_bytes(wheel: Callable[..., Path], windows_wheel: Callable[..., Path], tmp_path: Path) -> None:
    paths = [wheel(), windows_wheel()]
    first = render(make(paths))
    os.utime(paths[0], (1, 1))
    assert render(make(paths[::-1])) == first
    assert str(tmp_path) not in first


def test_the_command(wheel: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "made" / "page.html"
    assert cli.main(["report", str(wheel()), "-o", str(output), "--against", str(wheel(folder="old"))]) == 0
    assert capsys.readouterr().out == f"{output}\n"
    assert output.read_text("utf-8").startswith("<!doctype html>\n")
    assert [each.name for each in output.parent.iterdir()] == ["page.html"]


def test_a_failure_leaves_the_old_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, broken = tmp_path / "report.html", tmp_path / NAMES["linux"]
    output.write_text("old")
    broken.write_bytes(b"no zip")
    assert cli.main(["report", str(broken), "-o", str(output)]) == 2
    assert "is not a readable wheel" in capsys.readouterr().err
    assert output.read_text() == "old"


def test_half_a_page_is_never_seen(
    wheel: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made, output = wheel(), tmp_path / "page" / "report.html"
    output.parent.mkdir()
    output.write_text("old")

    def full(self: Path, text: str, *_: object, **__: object) -> int:
        self.write_bytes(text[:3].encode())
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    assert cli.main(["report", str(made), "-o", str(output)]) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert output.read_text() == "old"
    assert [each.name for each in output.parent.iterdir()] == ["report.html"]


def test_a_place_that_cannot_be_written(wheel: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert cli.main(["report", str(wheel()), "-o", str(tmp_path / "file" / "report.html")]) == 2
    assert "cannot write" in capsys.readouterr().err
