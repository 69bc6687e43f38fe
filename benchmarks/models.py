"""``python -m benchmarks.models``: prefill and decoding of mlx-lm's models, with and without ``mlx_cuda.patch()``.

The models have the sizes of published ones and random weights, so that nothing has to be fetched; mlx-lm's own model and cache code runs
unchanged. The sides take turns; the first turn of each, in which plans and kernels are made, is timed apart. While MLX is patched there are
two conversations: the first has the recording of a step in its time, a later one takes over what the first has recorded.

Random weights make logits that lie close together, so that one rounding may choose another token, and every token after it. So the sides'
logits are also compared with those of attention and quantized matmuls in float32, all of them fed the same tokens.

``--weights`` measures fetched models instead: each with its real weights and, beside, with random ones, and text as the prompt of both.

Launched by ``mlx.launch`` on several GPUs, the models are tensor parallel (``model.shard``), and the first process writes the results:
``mlx.launch -n 2 --backend nccl -- python -m benchmarks.models …``.

With ``--peer`` torch decodes one sequence too, with the same weights as a CUDA graph, where ``benchmarks.peer`` knows the model, and its
profiler says which kernels a step of each side is.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import statistics
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_cuda
from mlx.nn.layers.quantized import QuantizedLinear, quantize
from mlx.utils import tree_map
from mlx_cuda._common.choice import Choice

from . import peer, vendored_parts
from .cells import speed
from .decoding import KV_BITS, KV_GROUP
from .measuring import Log, import_torch
from .mlx_lm_parts import add_package
from .profile import profile
from .provenance import collect, memory_used
from .result_file import write
from .weights import REAL, Fetched, rows

PREFILL_STEP = 2048  # as mlx-lm's generate
COMPARED_STEPS = 16
PROFILED_STEPS = 8
QWEN = {
    "model_type": "qwen3", "hidden_size": 2560, "num_hidden_layers": 36, "intermediate_size": 9728, "head_dim": 128,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 151936, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
    "max_position_embeddings": 40960, "rope_theta": 1e6,
}  # fmt: skip
LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "rms_norm_eps": 1e-5, "rope_theta": 5e5, "tie_word_embeddings": False,
    "max_position_embeddings": 131072,
}  # fmt: skip
QWEN_32B = {
    **QWEN, "hidden_size": 5120, "num_hidden_layers": 64, "intermediate_size": 25600, "num_attention_heads": 64,
    "tie_word_embeddings": False,
}  # fmt: skip
QUANTIZED: dict[str, Any] = {"group_size": 64, "bits": 4}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "Gemma 3 4B: head_dim 256, windows of 1024": (
        "gemma3_text",
        {
            "model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34, "intermediate_size": 10240, "head_dim": 256,
            "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262144, "sliding_window": 1024, "sliding_window_pattern": 6,
            "query_pre_attn_scalar": 256,
        },
    ),
    "Qwen 3 4B: head_dim 128": ("qwen3", QWEN),
    "Qwen 3 4B, 4 bit": ("qwen3", {**QWEN, "quantization": QUANTIZED}),
    "Qwen 3 32B": ("qwen3", QWEN_32B),
    "Qwen 3 32B, 4 bit": ("qwen3", {**QWEN_32B, "quantization": QUANTIZED}),
    "Llama 3.1 8B": ("llama", LLAMA),
    "Llama 3.1 8B, 4 bit": ("llama", {**LLAMA, "quantization": QUANTIZED}),
    "Qwen 3 30B-A3B, 4 bit: 8 of 128 experts": (
        "qwen3_moe",
        {
            "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "intermediate_size": 6144, "head_dim": 128,
            "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 151936, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
            "max_position_embeddings": 40960, "rope_theta": 1e6, "num_experts": 128, "num_experts_per_tok": 8, "decoder_sparse_step": 1,
            "mlp_only_layers": [], "moe_intermediate_size": 768, "norm_topk_prob": True, "quantization": QUANTIZED,
        },
    ),
    "Qwen 3.5 4B: linear attention in 24 of 32 layers": (
        "qwen3_5",
        {
            "model_type": "qwen3_5", "hidden_size": 2560, "num_hidden_layers": 32, "intermediate_size": 9216, "head_dim": 256,
            "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 248320, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
            "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4, "full_attention_interval": 4,
        },
    ),
    "Qwen 3 Next 80B-A3B, 4 bit, 16 of 48 layers": (
        "qwen3_next",
        {
            "model_type": "qwen3_next", "hidden_size": 2048, "num_hidden_layers": 16, "intermediate_size": 5120, "head_dim": 256,
            "num_attention_heads": 16, "num_key_value_heads": 2, "vocab_size": 151936, "rms_norm_eps": 1e-6, "rope_theta": 1e7,
            "partial_rotary_factor": 0.25, "max_position_embeddings": 262144, "tie_word_embeddings": False, "norm_topk_prob": True,
            "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4, "full_attention_interval": 4, "num_experts": 512, "num_experts_per_tok": 10,
            "decoder_sparse_step": 1, "mlp_only_layers": [], "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
            "quantization": QUANTIZED,
        },
    ),
    **vendored_parts.SHAPES,
}  # fmt: skip


@cache
def models_of_mlx_lm() -> Callable[[str], Any]:
    """mlx-lm's model modules, which need neither its tokenizers nor what these need."""
    try:
        add_package()
    except ImportError as error:
        raise SystemExit(f"{error}\n  fix: pip install mlx-lm") from error

    def load(name: str) -> Any:
        """Of mlx-lm, or of a package that has copies of its models."""
        package, _, module = name.rpartition(".")
        if not package:
            return importlib.import_module(f"mlx_lm.models.{name}")
        return vendored_parts.caches(package) if module == "cache" else vendored_parts.model_module(name)

    return load


def launched() -> Any | None:
    """The processes that ``mlx.launch`` has started, each with a GPU of its own; None where it has started none."""
    from mlx_cuda._all_sum import several_processes  # which earlier builds lack, whose steps benchmarks.timeline compares

    return mx.distributed.init(strict=True, backend="nccl") if several_processes() else None


def make(module: Any, arguments: dict[str, Any], group: Any | None = None, fill: Callable[[Any], None] = lambda _: None) -> Any:
    """A model with random weights, or what it is filled with, the same for any number of GPUs, and this one's part of it."""
    mx.random.seed(0)
    model = module.Model(module.ModelArgs.from_dict(arguments))
    fill(model)
    model.update(tree_map(lambda weight: weight.astype(mx.bfloat16), model.parameters()))
    if "quantization" in arguments:
        quantize(model, **arguments["quantization"])
    if group:
        model.shard(group)
    mx.random.seed(0)  # prompts that do not depend on it
    tree_map(mx.eval, model.parameters())  # one after the other, so that the float32 numbers of one are there at most
    return model


class Cache(list[Any]):
    """A model's caches, which are quantised after each part of the prompt where ``bits`` are given, as mlx-lm's generate does.

    While MLX is patched only: without, mlx-lm's attention to them raises an error or gives something else on CUDA.
    """

    bits: int | None = None

    def quantize(self) -> None:
        for index, layer in enumerate(self):
            if self.bits is not None and hasattr(layer, "to_quantized"):
                self[index] = layer.to_quantized(group_size=KV_GROUP, bits=self.bits)


def forward(model: Any, tokens: mx.array, cache: Any) -> mx.array:
    """The logits of these tokens, which mlx-vlm's models return in an object of theirs."""
    result: Any = model(tokens, cache=cache)
    return getattr(result, "logits", result)  # type: ignore[no-any-return]


def prefill(model: Any, cache: Any, prompt: mx.array) -> mx.array:
    """All but the last token in mlx-lm's steps, then that one; its logits."""
    last = prompt.shape[1] - 1
    for at in range(0, last, PREFILL_STEP):
        forward(model, prompt[:, at : min(at + PREFILL_STEP, last)], cache)
        cache.quantize()
        mx.eval([layer.state for layer in cache])  # nobody asks for these logits, so they are not computed
    return forward(model, prompt[:, last:], cache)


@dataclass
class Conversation:
    """Seconds of a prompt and of greedy steps, seconds of these that the host's thread computed, the peak of MLX's memory in bytes, what
    the driver has given away on the GPU at the end, in MiB, when MLX has given nothing back yet, and the tokens ``[B, count]``.
    """

    prefill: float
    decode: float
    host: float
    peak: int
    used: float | None
    tokens: mx.array


def generate(model: Any, cache: Any, prompt: mx.array, count: int) -> Conversation:
    """A prompt and ``count`` greedy steps."""
    mx.clear_cache()
    mx.reset_peak_memory()
    start = time.perf_counter()
    token = prefill(model, cache, prompt).argmax(axis=-1)
    mx.eval(token)
    middle, host = time.perf_counter(), time.thread_time()
    tokens = []
    for _ in range(count):
        token = forward(model, token, cache)[:, -1:].argmax(axis=-1)
        mx.async_eval(token)  # type: ignore[no-untyped-call]
        tokens.append(token)
    host = time.thread_time() - host
    mx.eval(tokens)
    end, peak = time.perf_counter(), mx.get_peak_memory()
    return Conversation(middle - start, end - middle, host, peak, memory_used(), mx.concatenate(tokens, axis=1))


@contextlib.contextmanager
def replaced(*replacements: tuple[Any, str, Callable[..., mx.array]]) -> Iterator[None]:
    """Other functions in place of MLX's."""
    with contextlib.ExitStack() as stack:
        for module, name, function in replacements:
            stack.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, function)
        yield


def attention_in_float32(*arrays: mx.array, mask: Any = None, **options: Any) -> mx.array:
    wide = mask.astype(mx.float32) if isinstance(mask, mx.array) and mask.dtype != mx.bool_ else mask
    result: mx.array = UPSTREAM(*(array.astype(mx.float32) for array in arrays), mask=wide, **options)
    return result.astype(arrays[0].dtype)


def _wide(w: mx.array, scales: mx.array, biases: mx.array | None, options: dict[str, Any]) -> mx.array:
    stored = {name: options[name] for name in ("group_size", "bits", "mode") if name in options}
    wide = mx.dequantize(w, scales, biases, dtype=mx.float32, **stored)
    return wide.swapaxes(-1, -2) if options.get("transpose", True) else wide


def matmul_in_float32(x: mx.array, w: mx.array, scales: mx.array, biases: mx.array | None = None, **options: Any) -> mx.array:
    return (x.astype(mx.float32) @ _wide(w, scales, biases, options)).astype(x.dtype)


def gathered_in_float32(x: mx.array, w: mx.array, scales: mx.array, biases: mx.array | None = None, **options: Any) -> mx.array:
    chosen = options["rhs_indices"]  # whether they are sorted is not said: MLX's float32 matmul of sorted ones is wrong on CUDA
    return mx.gather_mm(x.astype(mx.float32), _wide(w, scales, biases, options), rhs_indices=chosen).astype(x.dtype)


UPSTREAM = mx.fast.scaled_dot_product_attention


def engines(model: Any, cache: Any, prompt: mx.array) -> dict[str, dict[str, int]]:
    """How many calls of the prefill and of one decoding step go to which engine, by what ``explain`` says."""
    count: Counter[str] = Counter()

    def attention(*arrays: mx.array, scale: float, mask: Any = None, **rest: Any) -> mx.array:
        kind = "array" if isinstance(mask, mx.array) else mask or "no"
        count[f"{mlx_cuda.explain(*arrays, scale=scale, mask=mask, **rest).engine}, {kind} mask"] += 1
        return UPSTREAM(*arrays, scale=scale, mask=mask, **rest)

    def counted(ours: Callable[..., mx.array], upstream: Callable[..., mx.array]) -> Callable[..., mx.array]:
        def call(*arrays: mx.array, **options: Any) -> mx.array:
            count[f"{mlx_cuda.explain(ours, *arrays, **options).engine}, {ours.__name__}"] += 1
            return upstream(*arrays, **options)

        return call

    with replaced(
        (mx.fast, "scaled_dot_product_attention", attention),
        (mx, "quantized_matmul", counted(mlx_cuda.quantized_matmul, mx.quantized_matmul)),
        (mx, "gather_qmm", counted(mlx_cuda.gather_qmm, mx.gather_qmm)),
    ):
        token = prefill(model, cache, prompt).argmax(axis=-1)
        first = dict(count)
        count.clear()
        mx.eval(forward(model, token, cache))
    return {"prefill": first, "decode": dict(count)}


def forced_logits(model: Any, cache: Any, prompt: mx.array, tokens: mx.array) -> mx.array:
    """The logits of each step, ``[B, steps, vocabulary]``, where the tokens are given."""
    logits = [prefill(model, cache, prompt)]
    for index in range(tokens.shape[1] - 1):
        logits.append(forward(model, tokens[:, index : index + 1], cache)[:, -1:])
        mx.eval(logits[-1])
    return mx.concatenate(logits, axis=1).astype(mx.float32)


def compare(model: Any, make_cache: Callable[..., Any], prompt: mx.array, tokens: mx.array) -> dict[str, Any]:
    """Relative error of each side's logits against those in float32, and how often they choose the same token."""
    with replaced(
        (mx.fast, "scaled_dot_product_attention", attention_in_float32),
        (mx, "quantized_matmul", matmul_in_float32),
        (mx, "gather_qmm", gathered_in_float32),
    ):
        exact = forced_logits(model, make_cache(plain=True), prompt, tokens)
    upstream = forced_logits(model, make_cache(plain=True), prompt, tokens)
    with mlx_cuda.patch():
        patched = forced_logits(model, make_cache(), prompt, tokens)
    norm = mx.linalg.norm(exact)
    same = {
        "patched, upstream": (patched, upstream),
        "patched, float32": (patched, exact),
        "upstream, float32": (upstream, exact),
    }
    return {
        "steps": tokens.shape[1],
        "error": {name: (mx.linalg.norm(side - exact) / norm).item() for name, side in (("upstream", upstream), ("patched", patched))},
        "equal tokens": {name: (one.argmax(-1) == other.argmax(-1)).sum().item() for name, (one, other) in same.items()},
    }


def one_turn(model: Any, make_cache: Callable[..., Any], prompt: mx.array, count: int) -> tuple[dict[str, Conversation], Choice]:
    """A conversation of each side, and what decoded the last one."""
    made = {"upstream": generate(model, make_cache(plain=True), prompt, count)}
    with mlx_cuda.patch():
        for side in "first patched", "patched":
            made[side] = generate(model, make_cache(), prompt, count)
        return made, mlx_cuda.explain(mlx_cuda.decode_step, model)  # a model lets go of what it recorded when patch() ends


def of_steps(found: Callable[[Callable[[], None]], Any], model: Any, make_cache: Callable[..., Any], prompt: mx.array) -> dict[str, Any]:
    """What is found of a step of each side, such as its kernels."""

    def of_side(*, plain: bool = False) -> Any:
        cache = make_cache(plain=plain)
        token = prefill(model, cache, prompt).argmax(axis=-1)

        def step() -> None:
            mx.eval(forward(model, token, cache)[:, -1:].argmax(axis=-1))

        for _ in range(3):
            step()
        return found(step)

    upstream = of_side(plain=True)
    with mlx_cuda.patch():
        return {"upstream": upstream, "patched": of_side()}


def measure(
    name: str, args: argparse.Namespace, log: Callable[[str], None], torch: Any | None, group: Any | None, fetched: Fetched | None
) -> Iterator[dict[str, Any]]:
    """What the model does with each number of prompts. How close its logits are is asked for the first number only; what torch says is
    added after a result has been given, so that an error of torch's loses nothing.
    """
    batches, length, count, turns, kv_bits = args.batch, args.prompt, args.tokens, args.turns, args.kv_bits
    load = models_of_mlx_lm()
    module, arguments = fetched.shape if fetched else SHAPES[name]
    real = fetched is not None and fetched.weights == REAL
    model = make(load(module), arguments, group, fetched.fill) if fetched and real else make(load(module), arguments, group)
    caches = load(f"{module.rpartition('.')[0]}.cache".lstrip("."))

    def make_cache(*, plain: bool = False) -> Cache:
        cache = Cache(caches.make_prompt_cache(model))
        cache.bits = None if plain else kv_bits
        return cache

    log(f"{name}: made")
    for batch in batches:
        prompt = fetched.prompt(batch, length) if fetched else mx.random.randint(0, arguments["vocab_size"], (batch, length))
        mx.eval(prompt)
        sides: dict[str, list[Conversation]] = {}
        for turn in range(turns + 1):
            made, decoding = one_turn(model, make_cache, prompt, count)
            for side, each in made.items():
                sides.setdefault(side, []).append(each)
                seconds = f"{each.prefill:.2f} s of prefill, {each.decode:.2f} s of decoding"
                log(f"{name}: batch {batch}, turn {turn} of {turns}, {side}: {seconds}")
        agree = (sides["upstream"][-1].tokens == sides["patched"][-1].tokens).all(axis=0).tolist()
        keys = "" if kv_bits is None else f"{KV_BITS}{kv_bits} bit"
        result: dict[str, Any] = {"model": name + keys, "batch": batch, "prompt": length, "generated": count}
        result["gpus"] = group.size() if group else 1
        if fetched:
            result |= {"weights": fetched.weights, "config": arguments}
        result["tokens"] = {side: all_turns[-1].tokens[0].tolist() for side, all_turns in sides.items()}
        result["equal before the first difference"] = (*agree, False).index(False)  # type: ignore[misc]
        result["engines"] = engines(model, make_cache(plain=True), prompt)
        if batch == batches[0]:
            result["logits"] = compare(model, make_cache, prompt[:1], sides["upstream"][-1].tokens[:1, :COMPARED_STEPS])
        result["decoding"] = asdict(decoding)
        for side, all_turns in sides.items():
            counted = all_turns[1:]
            result[side] = {
                "host us a step": statistics.median(each.host for each in counted) / count * 1e6,
                "peak MiB": max(each.peak for each in counted) / 2**20,
                "driver's MiB": max((each.used for each in counted if each.used is not None), default=None),
                "seconds": [(each.prefill, each.decode) for each in all_turns],
            }
        log(f"{name}: {summary(result)}")
        yield result
        if torch and batch == 1 and peer.fits(arguments):
            result["torch"] = peer.decode(torch, model, arguments, length, count, turns)
            torch.cuda.empty_cache()
            log(f"{name}: torch {result['torch']}")
        if torch and batch == 1:
            result["profile"] = of_steps(lambda step: profile(torch, step, PROFILED_STEPS), model, make_cache, prompt)


def export_error() -> float:
    """Of a quantised layer that is exported while patched, and read again without, relative to the layer itself."""
    layer, x = QuantizedLinear(256, 256, **QUANTIZED), mx.random.normal((8, 256))
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder, "layer.mlxfn"))
        with mlx_cuda.patch():
            mx.export_function(file, layer, x)
        imported: Any = mx.import_function(file)
        (result,), expected = imported(x), layer(x)
        error: Any = mx.linalg.norm(result - expected) / mx.linalg.norm(expected)
        return float(error.item())


def summary(result: dict[str, Any]) -> str:
    speeds = (
        f"{side} {speed(result, side, 'prefill'):.0f} prefill, {speed(result, side):.1f} decode tokens/s"
        for side in ("upstream", "patched")
    )
    return f"batch {result['batch']}: {' | '.join(speeds)} (errors of the logits: {result.get('logits', {}).get('error', 'not asked')})"


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="python -m benchmarks.models", description=__doc__)
    parser.add_argument("--model", default="", metavar="TEXT", help="only the models whose name has this in it")
    parser.add_argument("--weights", nargs="+", metavar="MODEL", help="instead: folders, or models of `python -m tests.models fetch`")
    parser.add_argument("--form", nargs="+", default=["bf16", "4 bit"], help="of these: bf16, 8 bit, 4 bit, mxfp4 (default: bf16, 4 bit)")
    parser.add_argument("--prompt", type=int, default=8192)
    parser.add_argument("--kv-bits", type=int, choices=(4, 8), help="quantise keys and values as the prompt goes, 64 in a group")
    parser.add_argument("--tokens", type=int, default=128, help="tokens to generate (default: %(default)s)")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--turns", type=int, default=3, help="of each side, besides the first (default: %(default)s)")
    parser.add_argument("--peer", action="store_true", help="decode with torch too, and profile, where it is there and sees the GPU")
    parser.add_argument("--commit", help="name of the commit, where there is no checkout")
    parser.add_argument("--wheel", type=Path, help="the wheel that is installed, for its digest")
    parser.add_argument("-o", "--output", type=Path, required=True)
    args = parser.parse_args(words)
    group = launched()
    if group and args.peer:
        parser.error("--peer has no tensor parallel models: leave it out, or mlx.launch")
    if group and args.weights:
        parser.error("--weights has no tensor parallel models: leave it out, or mlx.launch")
    from ci.errors import EnvironmentProblem  # which is in a checkout alone

    try:
        fetched = {each.name: each for each in rows(args.weights or (), args.form)}
    except EnvironmentProblem as problem:
        parser.error(str(problem))
    log: Callable[[str], None] = (lambda _: None) if group and group.rank() else Log()
    torch = import_torch(log, wanted=True) if args.peer else None
    provenance = collect(words, torch=torch, commit_name=args.commit, wheel=args.wheel, quick=False)
    results: dict[str, Any] = {"kind": "models", "provenance": provenance, "cases": []}
    failed = []

    def save() -> None:
        if not group or group.rank() == 0:
            write(args.output, results)

    try:
        results["error of an exported layer"] = export_error()
    except Exception:
        failed.append("export")
        log(f"export: FAILED\n{traceback.format_exc().strip()}")
    for name in fetched or SHAPES:
        if args.model not in name:
            continue
        try:
            for result in measure(name, args, log, torch, group, fetched.get(name)):
                results["cases"].append(result)
                save()
            save()
        except Exception:
            failed.append(name)
            log(f"{name}: FAILED\n{traceback.format_exc().strip()}")
        mx.clear_cache()
    log(f"{len(results['cases'])} measured, {len(failed)} failed; results in {args.output}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
