"""How fast models of mlx-lm decode, against what the memory allows: a table and a picture of what ``benchmarks.models`` measured."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .cells import MEMORY, markdown, shown, speed
from .chart import COLOURS, LABELS, bars
from .profile import PARTS, REST, by_part
from .record import require_same_machine

PEER = "torch, CUDA graph"
PROMPT = 1024  # tokens, where none are named
HEADS = ("num_attention_heads", "num_key_value_heads")
KV_BITS, KV_GROUP = ", keys and values of ", 64  # how a model is called whose cache is quantised, and in groups of how many
# In the names of what is not MLX's.
OURS = ("GEMV", "product", "norm + ", "norm x ", "convolution", "append", "Attention", "CacheReplace", "QuantizedCacheAppend", "router")


def bytes_of_step(config: Mapping[str, Any], context: int, batch: int = 1, kv_bits: int | None = None) -> float:
    """What a token of each sequence reads at least: each weight that takes part once, and the keys and values of ``context`` tokens; of
    linear attention its state in float32, and that once more, to write it.
    """
    size, heads, kv_heads, layers = (config[name] for name in ("hidden_size", *HEADS, "num_hidden_layers"))
    dim = config.get("head_dim", size // heads)
    if "num_experts" in config:
        mlp = config["num_experts_per_tok"] * 3 * size * config["moe_intermediate_size"] + size * config["num_experts"]
        mlp += 3 * size * config.get("shared_expert_intermediate_size", 0)
    else:
        mlp = 3 * size * config["intermediate_size"]
    linear, state, queries = 0, 0, heads
    if "full_attention_interval" in config:
        linear = layers - layers // config["full_attention_interval"]
        keys, values = (config[f"linear_num_{kind}_heads"] * config[f"linear_{kind}_head_dim"] for kind in ("key", "value"))
        state, queries = 8 * values * config["linear_key_head_dim"], 2 * heads  # which have a gate
    weights = layers * mlp + config["vocab_size"] * size + (layers - linear) * size * (queries + heads + 2 * kv_heads) * dim
    if linear:
        weights += linear * size * (2 * keys + 3 * values)
    stored = config.get("quantization")
    each = 2.0
    if stored:  # with a scale and a bias of 16 bits for each group, or a scale of 8
        each = stored["bits"] / 8 + (4 if stored.get("mode", "affine") == "affine" else 1) / stored["group_size"]
    kept = 2 if kv_bits is None else kv_bits / 8 + 4 / KV_GROUP
    return float(weights * each + batch * ((layers - linear) * 2 * kv_heads * dim * context * kept + linear * state))


def limit(result: Mapping[str, Any], shapes: Mapping[str, tuple[str, Any]], device: str) -> float:
    """Tokens per second of all sequences if reading were all."""
    name, _, keys = result["model"].partition(KV_BITS)
    config, batch = result.get("config") or shapes[name][1], result["batch"]
    return float(batch * MEMORY[device] * 1e12 / bytes_of_step(config, result["prompt"], batch, int(keys.split()[0]) if keys else None))


def join_models(results: dict[str, Any], earlier: Mapping[str, Any]) -> int:
    """Take over the models of an earlier build that were not measured again, each with its commit, in their order there; how many."""
    own, before = results["provenance"], earlier["provenance"]
    require_same_machine(before, own)
    known: dict[tuple[Any, ...], dict[str, Any]] = {_what(each): each for each in results["cases"]}
    old = [{"commit": before["commit"], **each} if before["commit"] != own["commit"] else {**each} for each in earlier["cases"]]
    added = [each for each in old if _what(each) not in known]
    order = list(dict.fromkeys([*map(_what, old), *known]))
    results["cases"] = sorted([*known.values(), *added], key=lambda each: order.index(_what(each)))
    return len(added)


def _what(result: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(result[name] for name in ("model", "batch", "prompt"))


def _is_plain(result: Mapping[str, Any]) -> bool:
    return bool(result["batch"] == 1 and result["prompt"] == PROMPT)


def decoding_table(results: Mapping[str, Any], shapes: Mapping[str, tuple[str, Any]]) -> str:
    """Tokens per second of each side and of the memory, what a conversation costs besides, and what a recorded step is made of."""
    peer = [PEER] if any("torch" in each for each in results["cases"]) else []
    rest = [
        "patched", "", "cold", "bandwidth limit", "of that limit", "equal tokens", "logit error: MLX, patched",
    ]  # fmt: skip
    rows = [["model", "MLX", *peer, *rest]]
    prompt = "prefill, tokens/s: MLX, cold, patched"
    costs = [["model", prompt, "CPU time per step, us: MLX, patched", "peak memory, MiB: MLX, patched"]]
    counted = all(each[side].get("driver's MiB") for each in results["cases"] for side in ("upstream", "first patched", "patched"))
    costs[0] += ["driver's memory, MiB: MLX, patched"] if counted else []
    parts = [["model", "graph nodes per step", "fused nodes of mlx-cuda"]]
    for each in results["cases"]:
        upstream, first, patched = (speed(each, side) for side in ("upstream", "first patched", "patched"))
        most = limit(each, shapes, results["provenance"]["device"])
        error = each["logits"]["error"] if "logits" in each else {}
        errors = ", ".join(f"{error[side]:.1e}" for side in ("upstream", "patched") if side in error)
        name = each["model"] if _is_plain(each) else f"{each['model']}; {each['batch']} x {each['prompt']}"
        name += f" (`{each['commit'][:7]}`)" if "commit" in each else ""
        rows.append([
            name, f"{upstream:.0f}", *(f"{speed(each, 'torch'):.0f}" if "torch" in each else "" for _ in peer),
            f"{patched:.0f}", f"{patched / upstream:.2f}x", f"{first:.0f}", f"{most:.0f}", f"{patched / most:.0%}",
            f"{each['equal before the first difference']} of {each['generated']}", errors,
        ])  # fmt: skip
        peak = max(each[side]["peak MiB"] for side in ("first patched", "patched"))
        prompts = [speed(each, side, "prefill") for side in ("upstream", "first patched", "patched")]
        numbers = [prompts, [each[side]["host us a step"] for side in ("upstream", "patched")], [each["upstream"]["peak MiB"], peak]]
        if counted:
            driver = max(each[side]["driver's MiB"] for side in ("first patched", "patched"))
            numbers.append([each["upstream"]["driver's MiB"], driver])
        costs.append([name, *(", ".join(f"{number:.0f}" for number in each) for each in numbers)])
        made = [part for part in each["decoding"]["kernel"].split(", ") if any(word in part for word in OURS)]
        if made:
            parts.append([name, "".join(filter(str.isdigit, each["decoding"]["reason"])), shown(", ".join(made))])
    return "\n\n".join(markdown(table) for table in (rows, costs, parts) if len(table) > 1)


def profile_table(results: Mapping[str, Any]) -> str:
    """Kernels and microseconds of a step's parts, each side, of the models that were profiled."""
    profiled = [each for each in results["cases"] if "profile" in each]
    rows = [["part of a step", *(f"{each['model'].partition(':')[0]}: {side}" for each in profiled for side in ("MLX", "patched"))]]
    sides = [each["profile"][side] for each in profiled for side in ("upstream", "patched")]
    all_parts = [by_part(side) for side in sides]
    rows.extend(
        [part, *(f"{parts[part][0]:.0f}, {parts[part][1]:.0f} us" if parts[part][0] else "" for parts in all_parts)]
        for part in (*PARTS, REST)
        if any(parts[part][0] for parts in all_parts)
    )
    sums = [[sum(column) for column in zip(*parts.values(), strict=True)] for parts in all_parts]
    rows.append(["all", *(f"{count:.0f}, {time:.0f} us" for count, time in sums)])
    rows.append(["at least one kernel running", *(f"{side['busy us']:.0f} us" for side in sides)])
    times = [1e6 * each["batch"] / speed(each, side) for each in profiled for side in ("upstream", "patched")]
    rows.append(["step time without the profiler", *(f"{time:.0f} us" for time in times)])
    return markdown(rows)


def decoding_tables(results: Mapping[str, Any], shapes: Mapping[str, tuple[str, Any]]) -> dict[str, str]:
    """The blocks of docs/internals/decoding.md: each GPU has its own."""
    gpu = results["provenance"]["device"].removeprefix("NVIDIA ").split()[0]
    return {f"decoding_{gpu}": decoding_table(results, shapes), f"profile_{gpu}": profile_table(results)}


def draw_decoding(results: Mapping[str, Any], shapes: Mapping[str, tuple[str, Any]], output: Path) -> None:
    """Bars of each model, one sequence: MLX, torch where it was measured, patched, and the limit."""
    device = results["provenance"]["device"]
    models = [each for each in results["cases"] if _is_plain(each)]
    sides = {
        "upstream": [speed(each, "upstream") for each in models],
        "torch": [speed(each, "torch") if "torch" in each else 0.0 for each in models],
        "ours": [speed(each, "patched") for each in models],
        "memory": [limit(each, shapes, device) for each in models],
    }
    names = [each["model"].partition(":")[0].replace(", ", "\n", 1) for each in models]
    labels = LABELS | {"torch": PEER}
    shown = {labels[side]: (COLOURS[side], values) for side, values in sides.items() if any(values)}
    bars(names, shown, "tokens/s, one sequence", output)
