"""The page in headless Chromium: nothing scrolls sideways, nothing is asked of a network, text stands out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ci.report.model import Report
from ci.report.page import render


@pytest.mark.parametrize("width", [320, 360, 390, 760, 761, 1280])
def test_nothing_scrolls_sideways(everything: Report, browser: Any, tmp_path: Path, width: int) -> None:
    (tmp_path / "report.html").write_text(render(everything), "utf-8")
    requests, messages = [], []
    tab = browser.new_page(viewport={"width": width, "height": 800})
    tab.on("request", lambda request: requests.append(request.url))
    tab.on("console", lambda message: messages.append(message.text))
    tab.on("pageerror", lambda error: messages.append(str(error)))
    tab.goto((tmp_path / "report.html").as_uri())
    tab.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true })")
    assert tab.evaluate("document.documentElement.scrollWidth") == width
    right = "Math.max(...[...document.querySelectorAll('main table, .strip')].map(each => each.getBoundingClientRect().right))"
    assert tab.evaluate(right) <= width
    assert requests == [(tmp_path / "report.html").as_uri()]
    assert messages == []
    tab.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out(everything: Report, browser: Any, tmp_path: Path, scheme: str) -> None:
    """Contrast of 4.5 to 1 between ordinary text and what is behind it."""
    (tmp_path / "report.html").write_text(render(everything), "utf-8")
    tab = browser.new_page(viewport={"width": 1280, "height": 800}, color_scheme=scheme)
    tab.goto((tmp_path / "report.html").as_uri())
    colours = tab.evaluate(
        """() => {
          const canvas = Object.assign(document.createElement('canvas'), {width: 1, height: 1}).getContext('2d', {willReadFrequently: true})
          const rgb = colour => { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); return [...canvas.getImageData(0, 0, 1, 1).data] }
          const layers = each => each ? [...layers(each.parentElement), getComputedStyle(each).backgroundColor] : ['white']
          const behind = each => layers(each).map(rgb).at(-1)
          return [...document.querySelectorAll('main :is(h2, h3, p, th, td, small, summary, li, b), footer p')]
            .filter(each => each.offsetHeight && each.textContent.trim() && !each.closest('.k-ptx'))
            .map(each => [each.tagName + ' ' + each.textContent.trim().slice(0, 30), rgb(getComputedStyle(each).color), behind(each)])
        }"""
    )
    assert len(colours) > 100
    assert [name for name, text, ground in colours if contrast(text, ground) < 4.5] == []
    tab.close()


def contrast(first: list[int], second: list[int]) -> float:
    """By the Web Content Accessibility Guidelines."""

    def luminance(colour: list[int]) -> float:
        linear = [value / 255 / 12.92 if value / 255 <= 0.04045 else ((value / 255 + 0.055) / 1.055) ** 2.4 for value in colour[:3]]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, light = sorted((luminance(first), luminance(second)))
    return (light + 0.05) / (dark + 0.05)
