"""The checks that ask a running server: each symptom of the field has one, and a healthy server shows none."""

from collections.abc import Mapping
from typing import Any

import pytest

from kimigguf.engines.checkup import (
    TURNS,
    examine_life,
    examine_limit,
    examine_memory,
    examine_numa,
    examine_numbers,
    examine_processors,
    examine_turns,
)
from kimigguf.engines.doctor import Severity
from kimigguf.engines.registry import Life
from kimigguf.engines.selftest import Post, Refused
from kimigguf.units import GIB, MIB


def answering(answer: Mapping[str, Any] | Refused) -> Post:
    def post(_path: str, _body: Mapping[str, Any]) -> dict[str, Any]:
        if isinstance(answer, Refused):
            raise answer
        return dict(answer)

    return post


EARLIER = TURNS["messages"][1]["reasoning_content"]
CALLED = TURNS["messages"][3]["tool_calls"][0]["function"]["arguments"]
RESULT = TURNS["messages"][4]["content"]


@pytest.mark.parametrize(
    ("prompt", "codes"),
    [
        (f"{EARLIER} {CALLED} {RESULT}", []),
        (f"{CALLED} {RESULT}", ["thinking-dropped"]),
        (f"{EARLIER} {RESULT}", ["tools-dropped"]),
        (f"{EARLIER} {CALLED}", ["tools-dropped"]),
        ("nothing", ["thinking-dropped", "tools-dropped"]),
    ],
)
def test_a_template_that_drops_thinking_or_tools_is_found(prompt: str, codes: list[str]) -> None:
    assert [finding.code for finding in examine_turns(answering({"prompt": prompt}))] == codes


def test_what_the_arguments_cause_is_not_cured_by_a_start_with_the_same_arguments() -> None:
    (finding,) = examine_turns(answering({"prompt": f"{CALLED} {RESULT}"}))
    assert "restart" not in finding.hint
    assert "kimigguf stop" in finding.hint


def test_a_server_that_refuses_a_tools_result_is_why_agents_stop() -> None:
    (finding,) = examine_turns(answering(Refused("HTTP 400: Expected 'content'", 400)))
    assert finding.code == "turns-refused"
    assert "agents stop after a tool call" in finding.message
    assert "HTTP 400" in finding.evidence
    assert list(examine_turns(answering({}))) == []  # an engine without that address


@pytest.mark.parametrize("status", [None, 401, 404, 503])
def test_a_template_is_not_blamed_for_a_key_an_address_or_a_time_out(status: int | None) -> None:
    assert list(examine_turns(answering(Refused("no", status)))) == []


def test_gibberish_is_found_by_its_numbers() -> None:
    (finding,) = examine_numbers(answering({"completion_probabilities": [{"token": "!", "logprob": None}]}))
    assert (finding.code, finding.severity) == ("not-a-number", Severity.FAILING)
    assert "gibberish" in finding.message
    assert list(examine_numbers(answering({"completion_probabilities": [{"token": "a", "logprob": -1.0}]}))) == []
    assert list(examine_numbers(answering(Refused("timed out")))) == []


@pytest.mark.parametrize(
    ("nodes", "balancing", "argv", "codes"),
    [
        (1, "1", (), []),
        (2, "0", ("llama-server", "--numa", "distribute"), []),
        (2, "1", ("llama-server", "--numa", "distribute"), ["numa-balancing"]),
        (2, "0", ("llama-server",), ["two-sockets"]),
        (8, "1", ("llama-server",), ["numa-balancing", "two-sockets"]),
        (2, None, ("llama-server", "--numa", "distribute"), []),  # unknown is no finding
        (0, None, (), []),
    ],
)
def test_half_the_speed_on_two_sockets_has_its_causes(
    nodes: int, balancing: str | None, argv: tuple[str, ...], codes: list[str]
) -> None:
    assert [finding.code for finding in examine_numa(nodes, balancing, argv)] == codes


def test_a_limit_of_the_servers_own_explains_empty_answers() -> None:
    (finding,) = examine_limit(("llama-server", "-c", "4096", "-n", "256"))
    assert finding.code == "cut-off"
    assert "not broken" in finding.message
    assert list(examine_limit(("llama-server", "-n", "-1"))) == []
    assert list(examine_limit(("llama-server", "-n"))) == []


def test_a_server_that_hangs_or_is_watched_by_nobody_is_found() -> None:
    found = [finding for life in Life for finding in examine_life(life, "k3")]
    assert [finding.code for finding in found] == ["hung", "orphaned"]
    assert all("kimigguf restart --name k3" in finding.hint for finding in found)  # another may run


@pytest.mark.parametrize(("percent", "codes"), [(None, []), (2.0, []), (61.2, ["contended-processors"])])
def test_processors_that_others_use_are_found(percent: float | None, codes: list[str]) -> None:
    found = list(examine_processors({"processor_wait_percent": percent}))
    assert [finding.code for finding in found] == codes
    assert all("61 % of the last 60 s" in finding.evidence for finding in found)


def seen(*, state: str = "passed", unexplained: int | None = 0, own: int = 4 * GIB) -> dict[str, Any]:
    now = own + (unexplained or 0)
    return {
        "memory_pressure": {"state": state, "evidence": "12 % of the last 60 s stalled", "hint": "less"},
        "host_memory": {
            "anonymous_bytes": now - MIB,
            "swapped_bytes": MIB,
            "growth": {"unexplained_bytes": unexplained, "total_bytes": unexplained},
        },
        "planned_bytes": 700 * GIB,  # mapped weights: they do not grow, and allow no growth
    }


@pytest.mark.parametrize(
    ("known", "codes"),
    [
        (seen(), []),
        (seen(state="failed"), ["memory-pressure"]),
        (seen(state="unknown", unexplained=None), []),
        (seen(unexplained=30 * GIB, own=700 * GIB), []),  # weights in memory of its own: of that it is little
        (seen(unexplained=40 * GIB, own=700 * GIB), ["unexplained-growth"]),
        (seen(unexplained=900 * MIB), []),
        (seen(unexplained=1100 * MIB), ["unexplained-growth"]),
    ],
)
def test_memory_that_runs_short_or_leaks_is_found(known: dict[str, Any], codes: list[str]) -> None:
    assert [finding.code for finding in examine_memory(known, "k3")] == codes
