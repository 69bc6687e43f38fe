"""What ``benchmarks.models`` compares decoding with: the same weights in torch, as one writes it by hand where a step has to be fast.

Projections that read the same are one GEMM, the cache has a fixed size, and the step is a CUDA graph, launched for each token, whose
place lies on the device. Of torch's ways to attend to a part of a cache the fastest counts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

BUCKET = 256  # a cache has a multiple of these rows


def fits(config: Mapping[str, Any]) -> bool:
    """Whether it is a dense model of 16-bit weights that ``Peer`` knows."""
    return config.get("model_type") in {"llama", "qwen3"} and not {"quantization", "rope_scaling", "attention_bias"} & set(config)


class Peer:
    """One sequence. ``capacity`` is the rows of its cache, which are random until they are written."""

    def __init__(self, torch: Any, model: Any, config: Mapping[str, Any], capacity: int, device: str) -> None:
        self.torch, self.eps = torch, config["rms_norm_eps"]
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.dim = config.get("head_dim", config["hidden_size"] // self.heads)
        stored: dict[str, Any] = dict(tree_flatten(model.parameters()))
        dtype = getattr(torch, str(stored["model.norm.weight"].dtype).rpartition(".")[2])

        def weight(*names: str) -> Any:
            """One below the other; copies, because MLX would move what the host reads."""
            raw = (np.array(mx.view(stored[f"{name}.weight"], mx.uint8) + 0) for name in names)
            return torch.cat([torch.from_numpy(each).view(dtype).to(device) for each in raw])

        def layer(at: str) -> tuple[Any, ...]:
            attention, norms = f"{at}.self_attn", [("q", self.heads), ("k", self.kv_heads)] if config["model_type"] == "qwen3" else []
            return (
                weight(f"{at}.input_layernorm"),
                weight(*(f"{attention}.{name}_proj" for name in "qkv")),
                torch.cat([weight(f"{attention}.{name}_norm").expand(number, -1) for name, number in norms]) if norms else None,
                *(torch.randn((capacity, self.kv_heads, self.dim), dtype=dtype, device=device) for _ in ("keys", "values")),
                weight(f"{attention}.o_proj"),
                weight(f"{at}.post_attention_layernorm"),
                weight(f"{at}.mlp.gate_proj", f"{at}.mlp.up_proj"),
                weight(f"{at}.mlp.down_proj"),
            )

        self.layers = [layer(f"model.layers.{index}") for index in range(config["num_hidden_layers"])]
        self.embedding, self.norm = weight("model.embed_tokens"), weight("model.norm")
        self.head = weight("lm_head") if "lm_head.weight" in stored else self.embedding
        self.rows = torch.arange(capacity, device=device)
        frequencies = config["rope_theta"] ** (-torch.arange(0, self.dim, 2, dtype=torch.float64, device=device) / self.dim)
        cos, sin = (of(self.rows[:, None] * frequencies) for of in (torch.cos, torch.sin))
        self.rotations = torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)], 1).to(dtype)  # [capacity, 2, dim]
        self.token, self.position = (torch.zeros(1, dtype=torch.int64, device=device) for _ in range(2))
        self.mask = torch.zeros((1, 1, 1, capacity), dtype=dtype, device=device)
        self.ranges = torch.tensor([[0, 1], [0, 0]], dtype=torch.int32, device=device)  # of the query, and of the keys

    def masked(self, q: Any, keys: Any, values: Any) -> Any:
        attend = self.torch.nn.functional.scaled_dot_product_attention
        return attend(q[:, :, None], keys.transpose(0, 1)[None], values.transpose(0, 1)[None], attn_mask=self.mask, enable_gqa=True)

    def flash(self, q: Any, keys: Any, values: Any) -> Any:
        """Of 16 bits on a GPU: as of packed sequences, whose lengths lie on the device. The keys of a single query are split."""
        return self.torch.ops.aten._flash_attention_forward(q, keys, values, *self.ranges, 1, keys.shape[0], 0.0, False, False)[0]

    def begin(self, position: int) -> None:
        self.token.zero_()
        self.position.fill_(position)

    def step(self, attend: Callable[..., Any]) -> None:
        """``logits``, ``[1, vocabulary]``, of the token; the best takes its place, one further."""
        torch, of = self.torch, self.torch.nn.functional
        norm = partial(of.rms_norm, normalized_shape=(self.norm.numel(),), eps=self.eps)
        cos, sin = self.rotations.index_select(0, self.position).unbind(1)
        self.mask.zero_().masked_fill_(self.rows > self.position, -torch.inf)
        self.ranges[1, 1:] = self.position + 1
        rotated = self.heads + self.kv_heads
        x = of.embedding(self.token, self.embedding)
        for before, qkv_proj, heads_norm, keys, values, o_proj, after, gate_up_proj, down_proj in self.layers:
            qkv = of.linear(norm(x, weight=before), qkv_proj).view(1, -1, self.dim)
            qk = qkv[:, :rotated]
            if heads_norm is not None:
                qk = of.rms_norm(qk, (self.dim,), eps=self.eps) * heads_norm
            qk = torch.addcmul(qk * cos, qk.roll(self.dim // 2, -1), sin)
            keys.index_copy_(0, self.position, qk[:, self.heads :])
            values.index_copy_(0, self.position, qkv[:, rotated:])
            x = x + of.linear(attend(qk[:, : self.heads], keys, values).reshape(1, -1), o_proj)
            gate, up = of.linear(norm(x, weight=after), gate_up_proj).chunk(2, -1)
            x = x + of.linear(of.silu(gate) * up, down_proj)
        self.logits = of.linear(norm(x, weight=self.norm), self.head)
        self.token.copy_(self.logits.argmax(-1))
        self.position.add_(1)

    def captured(self, attend: Callable[..., Any]) -> Callable[[], None]:
        """A step as a CUDA graph; without a GPU as it is."""
        if not self.token.is_cuda:
            return partial(self.step, attend)
        self.begin(0)
        for _ in range(3):  # in which cuBLAS and cuDNN choose
            self.step(attend)
        graph = self.torch.cuda.CUDAGraph()
        with self.torch.cuda.graph(graph):
            self.step(attend)
        return graph.replay  # type: ignore[no-any-return]


def decode(torch: Any, model: Any, config: Mapping[str, Any], length: int, count: int, turns: int) -> dict[str, Any]:
    """Tokens per second of ``count`` steps after ``length`` random rows, each way."""
    peer = Peer(torch, model, config, -(-(length + count) // BUCKET) * BUCKET, "cuda")
    mx.clear_cache()
    speeds = {}
    for name, attend in (("masked", peer.masked), ("flash", peer.flash)):
        launch = peer.captured(attend)
        seconds = []
        for _ in range(turns + 1):
            peer.begin(length)
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(count):
                launch()
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        speeds[name] = count / statistics.median(seconds[1:])
    return {"attention": speeds, "version": torch.__version__}
