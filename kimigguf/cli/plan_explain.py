"""A plan in words, for a colleague: why this quant, this split and this context."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from kimigguf.units import memory, storage

if TYPE_CHECKING:
    from kimigguf.cli.plan import Answer


def explanation(answer: "Answer") -> Iterator[str]:
    """Paragraphs, each about one decision."""
    yield _quant(answer)
    yield _split(answer)
    yield _context(answer)
    yield _beside(answer)


def _quant(answer: "Answer") -> str:
    spec, quant = answer.target.spec, answer.target.quant
    experts = sum(layer.expert_bytes for layer in spec.layers)
    text = (
        f"Why this quant: its weights take {storage(spec.weight_bytes)}, of which {memory(experts)} are routed experts"
        f" and {memory(spec.weight_bytes - experts)} the rest, which every token reads."
    )
    if quant is not None and quant.quality.kld is not None:
        text += (
            f" Its published distance from the original is a KL divergence of {quant.quality.kld} per token"
            f" ({quant.quality.top1_percent} % of tokens come out the same)."
        )
    have = answer.have
    if have.total_bytes is not None:
        text += f" The machine can use {memory(have.ram_bytes)} of RAM and {memory(have.vram_bytes)} of VRAM for it."
    if answer.plan.streamed_bytes:
        text += (
            f" That is not enough: {memory(answer.plan.streamed_bytes)} of experts stay on disk and are read when a"
            " token needs them, so it answers slowly."
        )
    return text


def _split(answer: "Answer") -> str:
    from kimigguf.memory.layout import HOST
    from kimigguf.memory.ledger import Component

    layout, spec = answer.plan.layout, answer.target.spec
    on_devices = [index for index, place in enumerate(layout.layers) if place.trunk is not None]
    if not on_devices:
        why = "there is no accelerator with room" if answer.have.devices else "the machine has no accelerator"
        return f"Why this split: {why}, so all layers lie in RAM and the processor computes them."
    rows = [row for row in answer.plan.ledger.rows if row.component is Component.EXPERTS]
    held = sum(row.size_bytes or 0 for row in rows if row.device is not HOST)
    experts = sum(layer.expert_bytes for layer in spec.layers)
    text = (
        "Why this split: every token reads the whole trunk but only a few experts, so the trunks of"
        f" {len(on_devices)} of {len(layout.layers)} layers went to the accelerators first, each holding neighbouring"
        " layers so that little is passed between them. "
    )
    if len(on_devices) < len(layout.layers):
        text += "The others found no room there and stay in RAM, the first layers first, as llama.cpp has it. "
    if held < experts:
        return text + (
            f"What room was left took {memory(held)} of experts; the other {memory(experts - held)} stay in RAM,"
            " where a token reads only those it is routed to. They are not repacked, so the system may drop"
            " their pages and read them again from the file."
        )
    text += "All experts have room there too, so nothing but the token embedding is read from RAM."
    if len(layout.devices) > 1 and layout.is_overridden:
        text += (
            " The rules of --override-tensor keep llama.cpp from overlapping batches over the accelerators"
            " (pipelining): for that it would keep four copies of what passes between them, and no split was found that"
            " has the room."
        )
    return text


def _context(answer: "Answer") -> str:
    from kimigguf.memory.ledger import Component

    settings, ledger = answer.plan.settings, answer.plan.ledger

    def size(component: Component) -> int:
        return sum(row.size_bytes or 0 for row in ledger.rows if row.component is component)

    text = (
        f"Why this context: {settings.context_tokens:,} tokens cost {memory(size(Component.KV_CACHE))} of cache in"
        f" {settings.kv_type} and, whatever the length, {memory(size(Component.RECURRENT_STATE))} of state for"
        f" {settings.slots} {'slot' if settings.slots == 1 else 'slots'}."
    )
    if not answer.plan.gave_way:
        return text + " It fits as asked, so nothing had to give way."
    return text + (
        " It did not fit as asked. What gives way first is what only saves time (checkpoints, then the prompt cache),"
        " then the batch, and the context last: " + "; ".join(answer.plan.gave_way) + "."
    )


def _beside(answer: "Answer") -> str:
    from kimigguf.memory.ledger import Column

    ledger = answer.plan.ledger
    rows = [row for row in ledger.rows if row.column is Column.BESIDE and row.size_bytes]
    parts = ", ".join(f"{row.component} {memory(row.size_bytes)}" for row in rows if row.device is None)
    return (
        "What other estimates leave out, and this one counts: " + (parts or "nothing here") + ". Each GPU also keeps"
        " 1 GiB back for its driver's context, and the system the larger of 4 GiB and 3 % of RAM."
    )
