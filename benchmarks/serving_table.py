"""Tables of what ``benchmarks.serving`` measured, for docs/guides/serving.md."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .cells import SIDES, markdown

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def _number(value: float | None, form: str = ".0f") -> str:
    return "" if value is None else format(value, form)


def speed(found: Mapping[str, Any]) -> float | None:
    """Tokens per second of a side."""
    return found["tokens"] / found["seconds"] if found["seconds"] else None


def replayed(found: Mapping[str, Any]) -> float | None:
    """The part of the model's steps that were replayed; None of a side that is not patched."""
    steps = found["decoding steps"] + found["first steps of joining requests"]
    return found["replayed"] / steps if steps and "replayed" in found else None


def _name(entry: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """The model, and what was asked of it."""
    vary = f" +- {settings['vary']:.0%}" if settings["vary"] else ""
    arrive = f"{settings['rate']:g}/s" if settings["rate"] else "at once"
    bits = f", {settings['kv_bits']} bit keys and values" if settings.get("kv_bits") else ""
    return f"{entry['model']}{bits}; {entry['requests']} x ({settings['prompt']} + {settings['tokens']}){vary}, {arrive}"


def _measured(results: Sequence[Mapping[str, Any]], kind: str) -> list[tuple[Mapping[str, Any], Mapping[str, Any], str, Mapping[str, Any]]]:
    """Settings, entry, side and result of all that was measured: ``requests`` or ``soak``."""
    return [
        (each["settings"], entry, side, entry[side])
        for each in results
        for entry in each["cases"]
        if kind in entry
        for side in SIDES
        if side in entry
    ]


def speed_table(results: Sequence[Mapping[str, Any]]) -> str:
    """A row for each side: the speed, how many times MLX's, what a request sees, and its tokens beside those of the same alone."""
    rows = [
        [
            "requests, tokens of each, arrivals",
            "side",
            "tokens/s",
            "",
            "inter-token latency, ms: p50, p99",
            "time to first token, s: p50, p99",
            "mean batch",
            "leading tokens equal to the request run alone",
        ]
    ]
    for settings, entry, side, found in _measured(results, "requests"):
        head = [_name(entry, settings), SIDES[side]]
        if "error" in found:
            rows.append([*head, f"failed: {found['error']}", *[""] * 5])
            continue
        upstream = speed(entry["upstream"]) if "seconds" in entry.get("upstream", {}) else None
        own = speed(found)
        ended = f", ended after {found['seconds']:.0f} s: {found['requests finished']} finished" if found["ended by the limit"] else ""
        between, first = ([found[name][share] for share in ("50th", "99th")] for name in ("between tokens, ms", "to the first token, ms"))
        rows.append([
            *head,
            _number(own) + ended,
            f"{own / upstream:.2f}x" if side != "upstream" and upstream and own else "",
            ", ".join(_number(value, ".1f") for value in between),
            ", ".join("" if value is None else f"{value / 1e3:.2f}" for value in first),
            _number(found["mean batch"], ".1f"),
            ", ".join(f"{each['equal']} of {each['of']}" for each in found["alone"]),
        ])  # fmt: skip
    return markdown(rows) if len(rows) > 1 else ""


def cost_table(results: Sequence[Mapping[str, Any]]) -> str:
    """Where the time went, and what was replayed."""
    rows = [
        [
            "requests, tokens of each, arrivals",
            "side",
            "seconds in prefill, decode, the rest, idle",
            "prefill, tokens/s",
            "decode steps",
            "replayed",
            "captured",
            "warm-up, s",
            "peak memory, MiB: MLX, driver",
        ]
    ]
    calls = [["requests, tokens of each, arrivals", "side", "cache calls, and their seconds"]]
    for settings, entry, side, found in _measured(results, "requests"):
        if "error" in found:
            continue
        head = [_name(entry, settings), SIDES[side]]
        share, prompts = replayed(found), found["wall clock"]["prompt steps"]
        rows.append([
            *head,
            ", ".join(f"{value:.1f}" for value in found["wall clock"].values()),
            _number(found["prompt tokens"] / prompts if prompts else None),
            f"{found['decoding steps']} + {found['first steps of joining requests']} of those that join",
            "" if share is None else f"{share:.0%}",
            str(found.get("recorded", "")),
            f"{found['warm-up seconds']:.1f}",
            ", ".join(filter(None, (_number(found["peak MiB"]), _number(found["driver's MiB"])))),
        ])  # fmt: skip
        if found.get("calls of caches"):
            each = (f"{value['calls']} x {name}, {value['seconds']:.1f} s" for name, value in found["calls of caches"].items())
            calls.append([*head, "; ".join(each)])
    return "\n\n".join(markdown(table) for table in (rows, calls) if len(table) > 1)


def soak_table(results: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        [
            "model",
            "side",
            "minutes",
            "requests",
            "cancelled",
            "tokens",
            "repeated in another batch",
            "with other tokens",
            "growth, MiB: MLX, driver, host",
            "failures",
        ]
    ]
    for _, entry, side, found in _measured(results, "soak"):
        if "error" in found:
            rows.append([entry["model"], SIDES[side], *[""] * 7, found["error"]])
            continue
        rows.append([
            entry["model"], SIDES[side], f"{found['readings, MiB'][-1]['at'] / 60:.0f}", str(found["requests"]), str(found["cancelled"]),
            str(found["tokens"]), str(found["repeated"]), str(len(found["first differences"])),
            ", ".join(_number(value, "+.0f") or "unknown" for value in found["growth, MiB"].values()),
            "; ".join(found["failures"]) or "none",
        ])  # fmt: skip
    return markdown(rows) if len(rows) > 1 else ""


def serving_tables(results: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The blocks of docs/guides/serving.md: each GPU has its own, of all files that are of it. What was not measured has none."""
    by_gpu: dict[str, list[Mapping[str, Any]]] = {}
    for each in results:
        by_gpu.setdefault(each["provenance"]["device"].removeprefix("NVIDIA ").split()[0], []).append(each)
    blocks: dict[str, str] = {}
    for gpu, own in by_gpu.items():
        blocks |= {f"serving_{gpu}": "\n\n".join(filter(None, (speed_table(own), cost_table(own)))), f"soak_{gpu}": soak_table(own)}
    return {name: text for name, text in blocks.items() if text}
