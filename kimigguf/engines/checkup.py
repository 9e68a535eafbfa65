"""The checks of ``doctor`` that only a running server can answer: by its own answers, its process and its machine.

Each asks for next to nothing: a rendered template and one token. What is busy or does not answer is not asked further.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any, Final

import psutil

from kimigguf.engines.doctor import Finding, Severity
from kimigguf.engines.evidence import Check, State
from kimigguf.engines.observe import observe
from kimigguf.engines.preflight import check_numa
from kimigguf.engines.registry import Entry, Life, life_of
from kimigguf.engines.selftest import ONE_TOKEN, Post, Refused, check_numbers, poster
from kimigguf.hardware.host import Host
from kimigguf.hardware.linux import read_numa
from kimigguf.units import memory

_THOUGHT, _ARGUMENT, _RESULT = "thought-7f3a", "argument-7f3a", "result-7f3a"
"""Words that stand in no template."""
TURNS: Final[Mapping[str, Any]] = {
    "messages": [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hello.", "reasoning_content": _THOUGHT},
        {"role": "user", "content": "Look."},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "I shall look.",
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "look", "arguments": f'{{"at": "{_ARGUMENT}"}}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "name": "look", "content": _RESULT},
    ],
    "tools": [
        {
            "type": "function",
            "function": {
                "name": "look",
                "description": "Looks.",
                "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
            },
        }
    ],
}
"""A turn with its thinking, then one with a tool call and its result: what a client sends back. The thinking is of the
earlier turn, as templates that drop it still keep that of a turn that goes on."""
_OF_THE_TEMPLATE: Final = {400, 500}
"""How llama-server answers where a template raises, by version."""
_SECONDS: Final = 60.0
"""For one token; a server that takes longer is busy, and says nothing about what ails it."""
_MOST_GROWTH: Final = 0.05
WAITED_PERCENT: Final = 20.0
"""Of a minute. Two cores that only an engine of two threads used showed 5 here; with one more busy process they showed
60, and a tenth of the tokens/s."""
_SETTLING_BYTES: Final = 1 << 30
"""Buffers that are touched for the first time, and what an allocator keeps."""


def examine_running(entry: Entry, key: str | None, environ: Mapping[str, str], *, is_k3: bool) -> tuple[Finding, ...]:
    """What ails a registered server now, besides what its log and its ``/props`` show."""
    life = life_of(entry)
    seen = observe(entry, key, environ)
    found = [*examine_life(life, entry.name), *examine_memory(seen, entry.name), *examine_processors(seen)]
    with suppress(psutil.Error):
        argv = tuple(psutil.Process(entry.engine.pid).cmdline())
        found += [*examine_limit(argv), *_examine_numa(argv)]
    free = seen["slots"] is not None and seen["slots_busy"] < seen["slots"]
    if life is Life.READY:
        post = poster(entry.address.url, key, entry.address.trust, seconds=_SECONDS)
        found += examine_turns(post) if is_k3 else ()
        found += examine_numbers(post) if free else ()
    return tuple(found)


def examine_life(life: Life, name: str) -> Iterator[Finding]:
    """A server that hangs, or that nobody watches any more."""
    if life is Life.SILENT:
        yield Finding(
            code="hung",
            severity=Severity.FATAL,
            message="the engine lives and does not answer: it hangs, or does not listen yet",
            evidence="no answer to GET /health within 2 s; a busy server answers that at once",
            hint=f"see what it says: kimigguf logs --name {name}; if it stays silent: kimigguf restart --name {name}",
        )
    if life is Life.ORPHANED:
        yield Finding(
            code="orphaned",
            severity=Severity.WORSE,
            message="the engine lives and its supervisor does not: nobody would notice its end",
            evidence="the supervisor's process has ended",
            hint=f"kimigguf restart --name {name}",
        )


def examine_memory(seen: Mapping[str, Any], name: str) -> Iterator[Finding]:
    """Memory that runs short around it, and growth that neither checkpoints nor the prompt cache explain."""
    pressure = seen["memory_pressure"]
    if pressure["state"] == State.FAILED:
        yield Finding(
            code="memory-pressure",
            severity=Severity.WORSE,
            message="memory runs short; once it is used up, the kernel ends the engine",
            evidence=pressure["evidence"],
            hint=pressure["hint"],
        )
    host = seen["host_memory"]
    unexplained = host["growth"]["unexplained_bytes"]
    # Mapped weights cannot leak: what counts is the process's own memory.
    own = (host["anonymous_bytes"] or 0) + (host["swapped_bytes"] or 0) - (host["growth"]["total_bytes"] or 0)
    if unexplained is not None and unexplained > max(_SETTLING_BYTES, _MOST_GROWTH * own):
        yield Finding(
            code="unexplained-growth",
            severity=Severity.WORSE,
            message="its memory has grown by more than its checkpoints and its prompt cache hold",
            evidence=f"{memory(unexplained)} since it was ready, when it had {memory(own)} of its own",
            hint=f"watch it: kimigguf status --name {name}; a restart gives it back: kimigguf restart --name {name}",
        )


def examine_processors(seen: Mapping[str, Any]) -> Iterator[Finding]:
    """Others that want the same processors: why tokens come many times slower, and nothing else shows it."""
    waited = seen["processor_wait_percent"]
    if waited is not None and waited >= WAITED_PERCENT:
        yield Finding(
            code="contended-processors",
            severity=Severity.WORSE,
            message="there are fewer processors than want to run. The engine's threads wait for each other after every "
            "operation, so that one without a processor holds up all of them",
            evidence=f"for {waited:.0f} % of the last 60 s some thread was ready and had no processor",
            hint="end what else computes (top), or serve with fewer threads than there are cores: -- --threads N; two "
            "engines need cores of their own (taskset)",
        )


def examine_limit(argv: Sequence[str]) -> Iterator[Finding]:
    """A limit of the server's own on every answer, which /props do not show; from the engine's command line."""
    for flag, value in pairwise(argv):
        if flag in {"-n", "--predict", "--n-predict"} and value.isdecimal() and int(value) > 0:
            yield Finding(
                code="cut-off",
                severity=Severity.WORSE,
                message="the server itself limits every answer. Where thinking uses that up, the content is empty and "
                "the finish reason is length: it is not broken",
                evidence=f"{flag} {value} in the engine's command",
                hint="start it without, as kimigguf serve does, and let the client say max_tokens",
            )


def _examine_numa(argv: Sequence[str]) -> tuple[Finding, ...]:
    host = Host()
    nodes = sum(node.cpus != 0 for node in read_numa(host) or ())
    return examine_numa(nodes, host.text("proc/sys/kernel/numa_balancing"), argv)


def examine_numa(nodes: int, balancing: str | None, argv: Sequence[str]) -> tuple[Finding, ...]:
    """Why a machine of several memory nodes gives half its speed: pages that move, or all on one side.

    Args:
        nodes: How many memory nodes with processors there are.
        balancing: /proc/sys/kernel/numa_balancing.
        argv: The engine's command line.
    """
    moved = [
        Finding(
            code="numa-balancing",
            severity=Severity.WORSE,
            message="the kernel moves memory between sockets while the model runs: half the speed",
            evidence=check.evidence,
            hint=check.hint or "",
        )
        for check in check_numa(nodes, balancing)
        if check.state is State.FAILED
    ]
    if nodes < 2 or "--numa" in argv:  # noqa: PLR2004 -- two are the fewest that can differ
        return tuple(moved)
    return (
        *moved,
        Finding(
            code="two-sockets",
            severity=Severity.WORSE,
            message="nothing spreads the work over the sockets: where the files lie in one socket's memory, the other "
            "reads them across, at half the speed",
            evidence=f"{nodes} memory nodes, and no --numa in the engine's command",
            hint="stop it, empty the page cache (echo 3 | sudo tee /proc/sys/vm/drop_caches), and serve again with a "
            "llama-server and at the end: -- --numa distribute",
        ),
    )


def examine_turns(post: Post) -> Iterator[Finding]:
    """Whether the template gives the model back what it thought and called, and what the tool answered."""
    try:
        prompt = post("/apply-template", TURNS).get("prompt")
    except Refused as refused:
        if refused.status not in _OF_THE_TEMPLATE:  # no such address, a key that is not known here, no answer in time
            return
        yield Finding(
            code="turns-refused",
            severity=Severity.FAILING,
            message="the server refuses a conversation with a tool's result: agents stop after a tool call",
            evidence=str(refused)[:300],
            hint="leave the template to the model's file: no --chat-template, and --jinja on, as kimigguf serve does",
        )
        return
    if not isinstance(prompt, str):
        return
    if _THOUGHT not in prompt:
        yield Finding(
            code="thinking-dropped",
            severity=Severity.FAILING,
            message="the thinking of earlier turns does not reach the model: multi-turn becomes inconsistent",
            evidence="reasoning_content of the assistant's message is not in the rendered prompt",
            # Not restart: that starts it with the same arguments.
            hint="kimigguf stop, then kimigguf serve with neither --chat-template nor --no-reasoning-preserve after --",
        )
    if missing := [words for words, mark in (("call", _ARGUMENT), ("result", _RESULT)) if mark not in prompt]:
        yield Finding(
            code="tools-dropped",
            severity=Severity.FAILING,
            message="tool calls or their results do not reach the model: agents stop after a tool call",
            evidence=f"the tool's {' and '.join(missing)} is not in the rendered prompt",
            hint="leave the template to the model's file: no --chat-template, and --jinja on, as kimigguf serve does",
        )


def examine_numbers(post: Post) -> Iterator[Finding]:
    """Whether one token of it is a number: a model that computes NaN answers gibberish under status 200."""
    try:
        check: Check = check_numbers(post("/completion", ONE_TOKEN))
    except Refused:
        return
    if check.state is State.FAILED:
        yield Finding(
            code="not-a-number",
            severity=Severity.FAILING,
            message="the model computes no numbers any more: answers are gibberish",
            evidence=check.evidence,
            hint=check.hint or "",
        )
