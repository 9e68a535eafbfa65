"""Kimi K3's forward pass as llama.cpp builds it (``src/models/kimi-k3.cpp``), for the size of its buffers only.

Three things in it decide memory: the stack of attention residuals, which gains a checkpoint every
``attn_res.block_size`` layers and lives to the end; the experts' activations, 16 x 3072 numbers per token; and the
attention mask of context x ubatch, once per device that has an MLA layer.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from kimigguf.errors import IntegrityError
from kimigguf.memory.graph import Graph, Id, Shape
from kimigguf.memory.kimi_k3 import ARCHITECTURE
from kimigguf.memory.program import Program, compiled
from kimigguf.memory.settings import KV_BLOCKS, Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """K3's dimensions, under the names of its GGUF keys."""

    width: int
    heads: int
    recurrent: tuple[bool, ...]
    query_rank: int | None
    latent_rank: int
    key: int
    value: int
    rope: int
    window: int
    kda_head: int
    dense: int
    dense_layers: int
    experts: int
    experts_used: int
    expert_inner: int
    expert_latent: int
    shared_inner: int
    residual_block: int
    vocabulary: int
    scaled_experts: bool

    @classmethod
    def of(cls, metadata: Mapping[str, object], vocabulary: int) -> "Sizes":
        """The dimensions from a header's or a profile's keys.

        Raises:
            IntegrityError: ``missing-key`` for a header without one of them.
        """

        def number(key: str, default: int | None = None) -> int:
            value = metadata.get(f"{ARCHITECTURE}.{key}", default)
            if isinstance(value, tuple) and value and isinstance(value[-1], int):
                return value[-1]
            if not isinstance(value, int):
                raise IntegrityError(f"the header does not give {ARCHITECTURE}.{key}", code="missing-key")
            return value

        kinds = metadata.get(f"{ARCHITECTURE}.attention.head_count_kv")
        if not isinstance(kinds, tuple):
            raise IntegrityError("the header does not say which layers are recurrent", code="missing-key")
        scale = metadata.get(f"{ARCHITECTURE}.expert_weights_scale", 1.0)
        return cls(
            width=number("embedding_length"),
            heads=number("attention.head_count"),
            recurrent=tuple(heads == 0 for heads in kinds[: number("block_count")]),
            query_rank=number("attention.q_lora_rank", 0) or None,
            latent_rank=number("attention.kv_lora_rank"),
            key=number("attention.key_length_mla"),
            value=number("attention.value_length_mla"),
            rope=number("rope.dimension_count"),
            window=number("ssm.conv_kernel"),
            kda_head=number("kda.head_dim"),
            dense=number("feed_forward_length"),
            dense_layers=number("leading_dense_block_count", 0),
            experts=number("expert_count"),
            experts_used=number("expert_used_count"),
            expert_inner=number("expert_feed_forward_length"),
            expert_latent=number("expert_latent_length", 0) or number("embedding_length"),
            shared_inner=number("expert_feed_forward_length") * max(number("expert_shared_count", 0), 1),
            residual_block=number("attn_res.block_size", 0),
            vocabulary=vocabulary,
            scaled_experts=scale not in {0.0, 1.0},
        )


@lru_cache(maxsize=16)
def build(sizes: Sizes, settings: Settings) -> Program:
    """The graph of one full batch, which llama.cpp reserves its buffers for."""
    return compiled(_Builder(sizes, settings).graph)


class _Builder:
    """Follows ``llama_model_kimi_k3::graph`` step by step; the order of ``expand`` is part of the answer."""

    def __init__(self, sizes: Sizes, settings: Settings) -> None:
        self.sizes = sizes
        self.settings = settings
        self.sequences = settings.slots
        asked = min(settings.stream_tokens * settings.streams, settings.effective_ubatch_tokens)
        self.tokens = -(-asked // self.sequences) * self.sequences
        self.graph = graph = Graph()
        self.stack: Id | None = None
        mask_kind = "f16" if settings.flash_attention else "f32"
        tokens = graph.input((self.tokens, 1, 1, 1), "i32")
        vectors = graph.input((sizes.width, self.tokens, 1, 1), "f32")
        embedded = graph.rows(graph.weights("token_embd.weight", (sizes.width, sizes.vocabulary, 1, 1)), tokens)
        graph.expand(embedded)
        graph.expand(vectors)
        slots = graph.input((self.sequences, 1, 1, 1), "i32")
        self.main = graph.view(slots, (self.sequences, 1, 1, 1), graph.stride[slots])
        self.extra = graph.view(slots, (0, 1, 1, 1), (4, 0, 0, 0))
        self.cells = graph.input((self.tokens, 1, 1, 1), "i64")
        streams = settings.streams
        self.mask = graph.input((settings.stream_tokens, self.tokens // streams, 1, streams), mask_kind)
        wanted = graph.input((min(asked, settings.batch_tokens), 1, 1, 1), "i32")
        stream = embedded
        for layer in range(len(sizes.recurrent)):
            stream = self._layer(layer, stream)
        self._head(stream, wanted)

    def _weight(self, layer: int, name: str, *shape: int) -> Id:
        full: Shape = (*shape, 1, 1, 1)[:4]  # type: ignore[assignment]  # four by the slice
        return self.graph.weights(f"blk.{layer}.{name}", full)

    def _norm(self, source: Id, weights: Id) -> Id:
        graph = self.graph
        return graph.like("mul", graph.like("rms_norm", source), weights)

    def _gated(self, gate: Id, up: Id) -> Id:
        """K3's activation: a scaled tanh of the gate times its sigmoid times a scaled tanh of the other branch."""
        graph = self.graph
        first = graph.like("scale", graph.like("unary", graph.like("scale", gate)))
        first = graph.like("mul", first, graph.like("unary", gate))
        second = graph.like("scale", graph.like("unary", graph.like("scale", up)))
        return graph.like("mul", first, second)

    def _push(self, stream: Id) -> None:
        graph = self.graph
        checkpoint = graph.reshape(stream, (self.sizes.width, 1, self.tokens, 1))
        self.stack = checkpoint if self.stack is None else graph.concat(self.stack, checkpoint, 1)

    def _mix(self, stream: Id, score: Id) -> Id:
        """Attention over the residual stream's checkpoints and its present state."""
        if self.stack is None:
            return stream
        graph = self.graph
        count, tokens = graph.shape[self.stack][1], self.tokens
        banked = graph.sum_rows(self._norm(self.stack, score))
        banked = graph.reshape(banked, (count, tokens, 1, 1))
        present = graph.sum_rows(self._norm(stream, score))
        scores = graph.like("soft_max", graph.concat(banked, present, 0))
        stride = graph.stride[scores]
        of_stack = graph.contiguous(graph.view(scores, (count, tokens, 1, 1), stride))
        of_stream = graph.contiguous(graph.view(scores, (1, tokens, 1, 1), stride))
        mixed = graph.new("hc_pre", (self.stack, of_stack), (self.sizes.width, tokens, 1, 1))
        return graph.like("add", mixed, graph.like("mul", stream, of_stream))

    def _layer(self, layer: int, stream: Id) -> Id:
        graph, sizes = self.graph, self.sizes
        mixing = sizes.residual_block > 0
        current = self._mix(stream, self._weight(layer, "attn_res_score.weight", sizes.width)) if mixing else stream
        banked = mixing and layer % sizes.residual_block == 0
        if banked:
            self._push(stream)
        current = self._norm(current, self._weight(layer, "attn_norm.weight", sizes.width))
        graph.expand(current)
        current = self._kda(layer, current) if sizes.recurrent[layer] else self._mla(layer, current)
        stream = current if banked else graph.like("add", stream, current)
        current = self._mix(stream, self._weight(layer, "ffn_res_score.weight", sizes.width)) if mixing else stream
        current = self._norm(current, self._weight(layer, "ffn_norm.weight", sizes.width))
        current = self._dense(layer, current) if layer < sizes.dense_layers else self._moe(layer, current)
        return graph.like("add", stream, current)

    def _head(self, stream: Id, wanted: Id) -> None:
        graph, sizes = self.graph, self.sizes
        if sizes.residual_block > 0:
            stream = self._mix(stream, graph.weights("output_res_score.weight", (sizes.width, 1, 1, 1)))
        stream = graph.rows(stream, wanted)
        stream = self._norm(stream, graph.weights("output_norm.weight", (sizes.width, 1, 1, 1)))
        logits = graph.matmul(graph.weights("output.weight", (sizes.width, sizes.vocabulary, 1, 1)), stream)
        graph.expand(logits)
        graph.is_output.update((stream, logits))

    def _state(self, cache: Id) -> Id:
        """Load the sequences' recurrent state (``build_rs``): clear one row, gather the rest, copy the unused ones."""
        graph = self.graph
        size, rows = graph.shape[cache][:2]
        states = graph.reshape(cache, (size, rows, 1, 1))
        first = graph.view(states, (size, 1, 1, 1), (4, 4 * size, 4 * size, 4 * size))
        cleared = graph.new("scale", (first,), graph.shape[first], view_of=first, stride=graph.stride[first])
        graph.expand(cleared)
        loaded = graph.rows(states, self.main)
        graph.expand(loaded)
        rest = graph.rows(states, self.extra)
        graph.expand(graph.copy(rest, graph.view(cache, (size, 0, 1, 1), graph.stride[cache])))
        return loaded

    def _convolved(self, layer: int, which: str, current: Id, cache: Id, loaded: Id) -> Id:
        """One of Q, K, V through its causal convolution, whose window over the last tokens is kept."""
        graph, sizes = self.graph, self.sizes
        inner, kept, sequences = sizes.heads * sizes.kda_head, sizes.window - 1, self.sequences
        row = graph.stride[loaded][1]
        window: Shape = (kept, inner, sequences, 1)
        before = graph.view(loaded, window, (4, 4 * kept, row, row * sequences))
        projected = graph.matmul(self._weight(layer, f"attn_{which}.weight", sizes.width, inner), current)
        projected = graph.reshape(projected, (inner, self.tokens // sequences, sequences, 1))
        joined = graph.concat(before, graph.transpose(projected), 0)
        last = graph.view(joined, window, graph.stride[joined])
        graph.expand(graph.copy(last, graph.view(cache, window, (4, 4 * kept, row, row * sequences))))
        kernel = self._weight(layer, f"ssm_conv1d_{which}.weight", sizes.window, 1, inner)
        kernel = graph.reshape(kernel, (sizes.window, inner, 1, 1))
        convolved = graph.new("ssm_conv", (joined, kernel), (inner, self.tokens // sequences, sequences, 1))
        convolved = graph.like("unary", graph.reshape(convolved, (inner, self.tokens, 1, 1)))
        return graph.reshape(convolved, (sizes.kda_head, sizes.heads, self.tokens // sequences, sequences))

    def _kda(self, layer: int, current: Id) -> Id:
        graph, sizes = self.graph, self.sizes
        head, heads, tokens, sequences = sizes.kda_head, sizes.heads, self.tokens, self.sequences
        inner, each = heads * head, tokens // sequences
        windows = graph.cached(layer, (3 * (sizes.window - 1) * inner, sequences, 1, 1), "f32")
        loaded = self._state(windows)
        query, key, value = (self._convolved(layer, which, current, windows, loaded) for which in "qkv")
        gate = graph.matmul(self._weight(layer, "ssm_f_a.weight", sizes.width, head), current)
        gate = graph.matmul(self._weight(layer, "ssm_f_b.weight", head, inner), gate)
        gate = graph.like("add", gate, self._weight(layer, "ssm_dt.bias", inner))
        decay = graph.reshape(self._weight(layer, "ssm_a", heads), (1, heads, 1, 1))
        gate = graph.like("mul", graph.reshape(gate, (head, heads, tokens, 1)), decay)
        gate = graph.like("scale", graph.like("unary", graph.like("scale", gate)))
        gate = graph.reshape(gate, (head, heads, each, sequences))
        beta = graph.matmul(self._weight(layer, "ssm_beta.weight", sizes.width, heads), current)
        beta = graph.like("unary", graph.reshape(beta, (1, heads, each, sequences)))
        flat = graph.reshape(current, (sizes.width, each, sequences, 1))
        states = graph.cached(layer, (head * head * heads, sequences, 1, 1), "f32")
        state = graph.reshape(self._state(states), (head, head, heads, sequences))
        query, key = (graph.like("scale", graph.like("rms_norm", tensor)) for tensor in (query, key))
        # The fused operation returns the output and, behind it, the new states.
        both = graph.new("delta_net", (query, key, value, gate, beta, state), (inner, tokens + head * sequences, 1, 1))
        output = graph.view(both, (head, heads, each, sequences), (4, 4 * head, 4 * inner, 4 * inner * each))
        matrix = 4 * head * head
        after = graph.view(both, (head, head, heads, sequences), (4, 4 * head, matrix, matrix * heads))
        graph.expand(graph.copy(after, graph.view(states, graph.shape[states], graph.stride[states])))
        output = graph.contiguous(output)
        flat = graph.reshape(flat, (sizes.width, tokens, 1, 1))
        outer = graph.matmul(self._weight(layer, "ssm_g.weight", sizes.width, inner), flat)
        outer = graph.reshape(outer, (head, heads, tokens, 1))
        output = graph.reshape(output, (head, heads, tokens, 1))
        output = self._norm(output, self._weight(layer, "ssm_norm.weight", head))
        output = graph.like("mul", output, graph.like("unary", outer))
        output = graph.new("cont", (output,), (inner, tokens, 1, 1))
        return graph.matmul(self._weight(layer, "attn_output.weight", inner, sizes.width), output)

    def _mla(self, layer: int, current: Id) -> Id:
        graph, sizes = self.graph, self.sizes
        heads, tokens, latent, rope = sizes.heads, self.tokens, sizes.latent_rank, sizes.rope
        plain = sizes.key - rope
        if sizes.query_rank:
            query = graph.matmul(self._weight(layer, "attn_q_a.weight", sizes.width, sizes.query_rank), current)
            query = self._norm(query, self._weight(layer, "attn_q_a_norm.weight", sizes.query_rank))
            query = graph.matmul(self._weight(layer, "attn_q_b.weight", sizes.query_rank, heads * sizes.key), query)
        else:
            query = graph.matmul(self._weight(layer, "attn_q.weight", sizes.width, heads * sizes.key), current)
        joint = graph.matmul(self._weight(layer, "attn_kv_a_mqa.weight", sizes.width, latent + rope), current)
        row = 4 * (latent + rope)
        compressed = graph.view(joint, (latent, tokens, 1, 1), (4, row, row * tokens, row * tokens))
        position = graph.view(joint, (rope, 1, tokens, 1), (4, row, row, row * tokens))
        compressed = self._norm(compressed, self._weight(layer, "attn_kv_a_norm.weight", latent))
        per_head: Shape = (4, 4 * sizes.key, 4 * sizes.key * heads, 4 * sizes.key * heads * tokens)
        nope = graph.view(query, (plain, heads, tokens, 1), per_head)
        pe = graph.view(query, (rope, heads, tokens, 1), per_head)
        absorbed = graph.matmul(self._weight(layer, "attn_k_b.weight", plain, latent, heads), graph.permute(nope))
        full_query = graph.concat(graph.permute(absorbed), pe, 0)
        compressed = graph.reshape(compressed, (latent, 1, tokens, 1))
        full_key = graph.concat(compressed, position, 0)
        output = self._attention(layer, full_query, full_key, compressed)
        gate = graph.matmul(self._weight(layer, "attn_gate.weight", sizes.width, heads * sizes.value), current)
        output = graph.like("mul", output, graph.like("unary", gate))
        return graph.matmul(self._weight(layer, "attn_output.weight", heads * sizes.value, sizes.width), output)

    def _attention(self, layer: int, query: Id, key: Id, value: Id) -> Id:
        graph, sizes, settings = self.graph, self.sizes, self.settings
        for tensor in (query, value, key):
            graph.expand(tensor)
        streams, cells, width = settings.streams, settings.stream_tokens, sizes.latent_rank + sizes.rope
        kind = str(settings.kv_type)
        cache = graph.cached(layer, (width, cells, streams, 1), kind)
        target = graph.reshape(cache, (width, cells * streams, 1, 1)) if streams > 1 else cache
        new = graph.view(key, (width, self.tokens, 1, 1), (4, 4 * width, 4 * width * self.tokens, 0))
        stored = graph.new(
            "set_rows", (new, self.cells, target), graph.shape[target], kind=kind, view_of=target,
            stride=graph.stride[target],
        )  # fmt: skip
        graph.expand(stored)
        row, size = settings.kv_type.row_bytes(width), KV_BLOCKS[kind][1]
        stride: Shape = (size, row, row, row * cells)
        keys = graph.view(cache, (width, 1, cells, streams), stride)
        values = graph.view(keys, (sizes.latent_rank, 1, cells, streams), stride)
        each = self.tokens // streams
        a, b, c, _ = graph.stride[query]
        query = graph.permute(graph.view(query, (width, sizes.heads, each, streams), (a, b, c, c * each)))
        keys, values = graph.permute(keys), graph.permute(values)
        back = self._weight(layer, "attn_v_b.weight", sizes.latent_rank, sizes.value, sizes.heads)
        wide: Shape = (sizes.heads * sizes.value, self.tokens, 1, 1)
        if settings.flash_attention:
            if kind == "f32":
                keys, values = graph.cast(keys, "f16"), graph.cast(values, "f16")
            out: Shape = (sizes.latent_rank, sizes.heads, each, streams)
            output = graph.new("flash_attn", (query, keys, values, self.mask), out)
            output = graph.matmul(back, graph.permute(output))
            output = graph.reshape(graph.contiguous(graph.permute(output)), wide)
        else:
            scores = graph.like("soft_max", graph.matmul(keys, query), self.mask)
            output = graph.matmul(graph.contiguous(graph.transpose(values)), scores)
            output = graph.new("cont", (graph.permute(graph.matmul(back, output)),), wide)
        graph.expand(output)
        return output

    def _dense(self, layer: int, current: Id) -> Id:
        graph, sizes = self.graph, self.sizes
        gate = graph.matmul(self._weight(layer, "ffn_gate.weight", sizes.width, sizes.dense), current)
        up = graph.matmul(self._weight(layer, "ffn_up.weight", sizes.width, sizes.dense), current)
        return graph.matmul(self._weight(layer, "ffn_down.weight", sizes.dense, sizes.width), self._gated(gate, up))

    def _chosen(self, layer: int, current: Id) -> tuple[Id, Id]:
        """The experts of each token, and their weights."""
        graph, sizes, tokens = self.graph, self.sizes, self.tokens
        used = sizes.experts_used
        logits = graph.matmul(self._weight(layer, "ffn_gate_inp.weight", sizes.width, sizes.experts), current)
        odds = graph.like("unary", logits)
        biased = graph.like("add", odds, self._weight(layer, "exp_probs_b.bias", sizes.experts))
        order = graph.new("argsort", (biased,), graph.shape[biased], kind="i32")
        chosen = graph.view(order, (used, tokens, 1, 1), graph.stride[order])
        weights = graph.rows(graph.reshape(odds, (1, sizes.experts, tokens, 1)), chosen)
        weights = graph.reshape(weights, (used, tokens, 1, 1))
        weights = graph.like("div", weights, graph.like("clamp", graph.sum_rows(weights)))
        weights = graph.reshape(weights, (1, used, tokens, 1))
        if sizes.scaled_experts:
            weights = graph.like("scale", weights)
        graph.expand(weights)
        return chosen, weights

    def _moe(self, layer: int, current: Id) -> Id:
        graph, sizes, tokens = self.graph, self.sizes, self.tokens
        latent, inner, used = sizes.expert_latent, sizes.expert_inner, sizes.experts_used
        routed = graph.matmul(self._weight(layer, "ffn_routed_down.weight", sizes.width, latent), current)
        chosen, weights = self._chosen(layer, current)
        routed = graph.reshape(routed, (latent, 1, tokens, 1))

        def expert(name: str, source: Id, before: int, after: int) -> Id:
            tensor = self._weight(layer, f"ffn_{name}_exps.weight", before, after, sizes.experts)
            return graph.new("mul_mat_id", (tensor, source, chosen), (after, used, tokens, 1))

        up = expert("up", routed, latent, inner)
        gate = expert("gate", routed, latent, inner)
        each = graph.like("mul", expert("down", self._gated(gate, up), inner, latent), weights)
        graph.expand(each)
        stride = graph.stride[each]
        parts = [
            graph.view(each, (latent, tokens, 1, 1), (stride[0], stride[2], stride[2] * tokens, 0)) for _ in range(used)
        ]
        for part in parts:
            graph.expand(part)
        total = parts[0]
        for part in parts[1:]:
            total = graph.like("add", total, part)
            graph.expand(total)
        total = self._norm(total, self._weight(layer, "ffn_routed_norm.weight", latent))
        total = graph.matmul(self._weight(layer, "ffn_routed_up.weight", latent, sizes.width), total)
        gate = graph.matmul(self._weight(layer, "ffn_gate_shexp.weight", sizes.width, sizes.shared_inner), current)
        up = graph.matmul(self._weight(layer, "ffn_up_shexp.weight", sizes.width, sizes.shared_inner), current)
        shared = graph.matmul(
            self._weight(layer, "ffn_down_shexp.weight", sizes.shared_inner, sizes.width), self._gated(gate, up)
        )
        return graph.like("add", total, shared)
