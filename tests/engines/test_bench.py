"""bench against real engines on the tiny K3, and against servers that say less, lie, refuse or break off."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engines.test_running import start
from fakes.engines import BOTH
from fakes.openai_server import Script, answering
from fakes.processes import free_port

from kimigguf.engines import bench, bench_client, bench_target
from kimigguf.engines.bench import Load, Shape, _with_others, chosen_depths, measure, new_text
from kimigguf.engines.bench_client import BenchClient
from kimigguf.engines.bench_report import Report, loaded_columns, make_report, to_data, to_run
from kimigguf.engines.bench_target import Target, look_at, placement_in_words, quant_in
from kimigguf.engines.llama_server import Server
from kimigguf.errors import KimiggufError, NetworkError, ServerError, UsageError
from kimigguf.events import Event, Step, ignore
from kimigguf.hardware.fingerprint import Card, Fingerprint
from kimigguf.hardware.usage import DevicePeak, Peaks, PeakWatch, TreeUse
from kimigguf.memory.layout import LayerPlace, Layout
from kimigguf.placement.plan import Plan
from kimigguf.speed.measured import MeasuredModel, MeasuredSettings
from kimigguf.speed.samples import Clock, Rejected, Sample, Warmth, by_the_server

SMALL = Shape(prompt_tokens=24, made_tokens=4)
QUANTS = ("UD-IQ1_M", "UD-IQ1_S")
USAGE = {"prompt_tokens": 30, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 0}}
WORDS: list[dict[str, Any]] = [
    {"choices": [{"index": 0, "delta": {"reasoning_content": "hm"}}]},
    {"choices": [{"index": 0, "delta": {"content": "yes"}}]},
    {"choices": [{"index": 0, "delta": {"content": "no"}, "finish_reason": "length"}]},
]


def samples(url: str, depths: tuple[int, ...] = (0,), *, repeat: int = 1, shape: Shape = SMALL) -> list[Any]:
    with BenchClient(url) as client:
        target = look_at(client, None, QUANTS)
        return list(measure(client, target, depths, repeat=repeat, shape=shape, listen=ignore))


@pytest.mark.parametrize("kind", BOTH)
def test_a_real_engine_is_measured_cold_and_warm_by_its_own_clock(kind: str, tiny_plan: Plan, tmp_path: Path) -> None:
    seen: list[Event] = []
    with start(kind, tiny_plan, tmp_path) as server:
        server.wait_ready(ignore)
        with BenchClient(server.address.url) as client, PeakWatch(server.pid) as watch:
            target = look_at(client, None, QUANTS)
            found = list(measure(client, target, (0, 100), repeat=1, shape=SMALL, listen=seen.append))
        columns = loaded_columns(server.log)
    assert target.is_native
    assert target.context_tokens == 4096
    assert target.slots == 1
    counted = [one for one in found if isinstance(one, Sample)]
    assert counted == found
    assert [(one.depth_tokens, one.warmth) for one in counted] == [
        (depth, warmth) for depth in (0, 100) for warmth in Warmth
    ]
    for one in counted:
        assert one.clock is Clock.SERVER
        assert one.made_tokens == SMALL.made_tokens
        assert one.others is None
        # A turn goes on from all of the one before: its prompt and what was generated, the last token perhaps not.
        kept = one.depth_tokens + SMALL.prompt_tokens + SMALL.made_tokens
        if one.warmth is Warmth.COLD:
            assert (one.prompt_tokens, one.cached_tokens) == (one.depth_tokens + SMALL.prompt_tokens, 0)
        else:
            assert one.cached_tokens in {kept - 1, kept}
            assert (one.cached_tokens or 0) + (one.prompt_tokens or 0) == kept + SMALL.prompt_tokens
    report = make_report(target, None, found, watch.peaks, columns)
    assert report.is_measured
    assert len(report.speeds) == 4
    assert not any("other clients" in line for line in report.unknown)
    assert report.peaks.tree is not None
    assert report.peaks.tree.resident_bytes > 10 << 20
    assert next(event.text for event in seen if isinstance(event, Step)) == "depth 0, 1 of 1: cold, 24 new tokens"


@pytest.mark.engine
@pytest.mark.native
def test_a_native_server_that_nobody_registered_is_known_by_its_process_and_its_file(
    tiny_plan: Plan, tmp_path: Path
) -> None:
    with start("llama-server", tiny_plan, tmp_path) as server:
        server.wait_ready(ignore)
        with BenchClient(f":{server.address.port}") as client:
            target = look_at(client, None, QUANTS)
        columns = dict(loaded_columns(server.log))
    assert target.pid == server.pid
    assert target.elsewhere is None
    assert target.model.quant == "UD-IQ1_M"
    assert target.model.size_bytes is not None
    assert target.model.size_bytes < 100 << 20
    assert target.engine is not None
    assert target.engine.startswith("llama.cpp b")
    assert columns["Host"].model_bytes > 0


@pytest.mark.engine
@pytest.mark.native
def test_a_reply_of_one_token_from_a_real_server_is_rejected(tiny_plan: Plan, tmp_path: Path) -> None:
    with start("llama-server", tiny_plan, tmp_path) as server:
        server.wait_ready(ignore)
        found = samples(server.address.url, shape=Shape(prompt_tokens=24, made_tokens=1))
    assert [one.reason for one in found] == ["1 generated: a rate needs 2 tokens or more"] * 2


@contextmanager
def busy(server: Server) -> Iterator[None]:
    """Another client, whose long answer goes on all the while."""
    with BenchClient(server.address.url) as other:
        body = {"prompt": "a b c", "n_predict": 100_000, "ignore_eos": True}

        def ask() -> None:
            with suppress(KimiggufError):  # the server is stopped in the middle of it
                while True:  # a quick machine comes to the end of the context
                    other.stream("/completion", body)

        thread = threading.Thread(target=ask)
        thread.start()
        try:
            with BenchClient(server.address.url) as client:
                while not any(slot["is_processing"] for slot in client.look("/slots")):
                    pass
            yield
        finally:
            server.stop()
            thread.join()


@pytest.mark.engine
@pytest.mark.native
def test_another_clients_load_is_noticed_and_told(tiny_plan: Plan, tmp_path: Path) -> None:
    with start("llama-server", tiny_plan, tmp_path, extra=("--parallel", "2", "--kv-unified")) as server:
        server.wait_ready(ignore)
        with busy(server):
            found = samples(server.address.url)
    assert all(isinstance(one, Rejected) for one in found)
    assert "it was not alone" in found[0].reason
    assert "1 slot at work for others" in found[0].reason


@pytest.mark.parametrize(
    ("before", "after", "slots", "others", "disturbed"),
    [
        (Load(done_tokens=100, busy_slots=0), Load(done_tokens=118, busy_slots=0), 4, None, False),
        (Load(done_tokens=100, busy_slots=0), Load(done_tokens=468, busy_slots=0), 4, "350 tokens of other", True),
        (Load(done_tokens=100, busy_slots=0), Load(done_tokens=118, busy_slots=2), 4, "2 slots at work", True),
        (Load(done_tokens=100, busy_slots=1), Load(done_tokens=468, busy_slots=0), 4, "350 tokens of other", True),
        # In one slot the others wait: our own figures are what they are.
        (Load(done_tokens=100, busy_slots=0), Load(done_tokens=468, busy_slots=1), 1, "350 tokens of other", False),
        (Load(), Load(), None, None, False),
        (Load(), Load(busy_slots=1), None, "1 slot at work", True),
        (Load(done_tokens=1000, busy_slots=0), Load(done_tokens=5, busy_slots=0), 4, None, False),  # it was restarted
    ],
)
def test_others_are_told_from_ourselves(
    before: Load, after: Load, slots: int | None, others: str | None, disturbed: bool
) -> None:
    sample = by_the_server({"prompt_n": 10, "predicted_n": 8}, depth_tokens=0, warmth=Warmth.COLD, client_seconds=None)
    found = _with_others(sample, before, after, slots)
    assert found.is_disturbed is disturbed
    assert (found.others or "").startswith(others or "")
    assert (found.others is None) == (others is None)
    assert found.is_watched == (after != Load())


def test_a_server_without_timings_is_measured_by_the_clients_clock_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of the test's own, half a second further at each look: a busy machine may read all pieces at once."""
    looks = count()
    monkeypatch.setattr(bench_client, "time", SimpleNamespace(perf_counter=lambda: next(looks) / 2))
    script = Script(chunks=[*WORDS, {"choices": [], "usage": USAGE}])
    with answering(script) as server, BenchClient(server.url) as client:
        target = look_at(client, None, QUANTS)
        found = list(measure(client, target, (100,), repeat=1, shape=SMALL, listen=ignore))
    assert not target.is_native
    cold, warm = found
    assert isinstance(cold, Sample)
    assert cold.clock is Clock.CLIENT
    assert cold.made_tokens == 3
    assert cold.first_token_seconds == 0.5
    assert cold.decode_tokens_per_second == 2.0  # two tokens after the first one, in two looks
    assert isinstance(warm, Rejected)  # it says that nothing was reused
    report = make_report(target, None, found, Peaks(), ())
    assert any("no `timings`" in line and "client's clock" in line for line in report.unknown)
    first, second = script.asked
    assert len(first["messages"][0]["content"].split()) == 124
    # K3's whole message goes back.
    assert second["messages"][1] == {"role": "assistant", "content": "yesno", "reasoning_content": "hm"}
    assert first["stream_options"] == {"include_usage": True}


def test_a_server_that_counts_nothing_leaves_rates_unknown_with_the_reason() -> None:
    with answering(Script(chunks=WORDS)) as server, BenchClient(server.url) as client:
        target = look_at(client, None, QUANTS)
        found = list(measure(client, target, (0,), repeat=1, shape=SMALL, listen=ignore))
    report = make_report(target, None, found, Peaks(), ())
    assert not report.is_measured
    assert report.why_not_kept == "nothing was measured"
    assert {speed.decode_tokens_per_second for speed in report.speeds} == {None}
    assert all(speed.first_token_seconds for speed in report.speeds)
    assert any("did not count their tokens" in line for line in report.unknown)
    assert any("warm may be cold" in line for line in report.unknown)
    assert any("served context" in line for line in report.unknown)
    assert any("whether other clients used it" in line for line in report.unknown)


@pytest.mark.parametrize(
    ("script", "kind", "code"),
    [
        (Script(status=401, error={"message": "no key"}), NetworkError, "bad-key"),
        (Script(status=503, error={"message": "Loading model"}), ServerError, "still-loading"),
        (Script(status=500, error={"message": "device lost"}), NetworkError, "http-error"),
        (
            Script(status=400, error={"message": "the request exceeds the available context size"}),
            UsageError,
            "depth-beyond-context",
        ),
        (Script(deltas=[{"content": "a"}], cut=True), ServerError, "answer-broke-off"),
        (Script(deltas=[{"content": "a"}], hang_up=True), ServerError, "answer-broke-off"),
        (Script(chunks=WORDS[:2]), ServerError, "answer-broke-off"),  # closed in good order, before its end
        (Script(raw=b'{"choices": [{"message": {"content": "all at once"}}]}'), ServerError, "answer-broke-off"),
    ],
)
def test_a_failure_in_the_middle_has_a_code_and_what_the_server_said(
    script: Script, kind: type[KimiggufError], code: str
) -> None:
    with answering(script) as server, pytest.raises(kind) as caught:
        samples(server.url)
    assert caught.value.code == code
    if script.error:
        assert caught.value.cause == script.error["message"]


def streamed(*events: object) -> Script:
    lines = (f"data: {json.dumps(event, ensure_ascii=False)}\n\n" for event in events)
    return Script(raw="".join(lines).encode())


def test_letters_at_which_text_breaks_lines_cost_no_piece_and_no_timings() -> None:
    """llama-server sends the prompt back with its timings; U+2028, which a model may say, stands in it as it is."""
    last = {"content": "", "prompt": "a\u2028b\x85c", "stop": True, "timings": {"predicted_n": 2}}
    script = streamed({"content": "x\u2028", "tokens": [7]}, {"content": "\x85y", "tokens": [8]}, last)
    with answering(script) as server, BenchClient(server.url) as client:
        found = client.stream("/completion", {})
    assert (found.turn.content, found.tokens) == ("x\u2028\x85y", (7, 8))
    assert found.turn.timings == {"predicted_n": 2}


@pytest.mark.parametrize(
    "odd",
    [3, [], {"choices": [None]}, {"choices": {"a": 1}}, {"choices": [{"delta": [1]}]}, {"tokens": 3}, {"error": None}],
)
def test_a_piece_of_no_known_shape_is_passed_over(odd: object) -> None:
    with answering(streamed(odd, *WORDS)) as server, BenchClient(server.url) as client:
        assert client.stream("/v1/chat/completions", {}).turn.content == "yesno"


def test_thinking_goes_back_under_the_name_that_it_came_by() -> None:
    script = Script(deltas=[{"reasoning": "hm"}, {"content": "yes"}])
    with answering(script) as server:
        samples(server.url)
    assert script.asked[1]["messages"][1] == {"role": "assistant", "content": "yes", "reasoning": "hm"}


def test_a_server_that_makes_no_tokens_of_text_is_not_asked_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BenchClient, "post", lambda *_: {"tokens": []})
    with BenchClient(":1") as client, pytest.raises(ServerError, match="no longer turns text into tokens"):
        bench._Native(client, SMALL).first(0)


def test_a_port_where_nobody_listens_is_told() -> None:
    with pytest.raises(NetworkError) as caught:
        samples(f"http://127.0.0.1:{free_port()}")
    assert caught.value.code == "server-unreachable"


@pytest.mark.parametrize(
    ("url", "props", "models"),
    [
        ("http://h:1", "http://h:1/props", "http://h:1/v1/models"),
        ("http://h:1/v1/", "http://h:1/props", "http://h:1/v1/models"),
        ("https://h/openai", "https://h/openai/props", "https://h/openai/models"),
        ("https://h/k3/v1", "https://h/k3/props", "https://h/k3/v1/models"),
    ],
)
def test_an_api_below_another_path_is_asked_there(url: str, props: str, models: str) -> None:
    with BenchClient(url) as client:
        assert (client.address("/props"), client.address("/v1/models")) == (props, models)


def target(**changes: Any) -> Target:
    facts: dict[str, Any] = {
        "url": "http://127.0.0.1:8080", "model_name": "kimi-k3", "is_native": True, "context_tokens": 8192,
        "model": MeasuredModel(quant="UD-IQ1_M"), "settings": MeasuredSettings(),
    }  # fmt: skip
    return Target(**(facts | changes))


@pytest.mark.parametrize(
    ("asked", "context", "chosen"),
    [
        (None, 8192, (0, 4096)),
        (None, 4096, (0,)),
        (None, None, (0, 4096)),
        ((0, 7040), 8192, (0, 7040)),
        ((5, 5, 0), 8192, (5, 0)),
        ((1 << 20,), None, (1 << 20,)),
    ],
)
def test_depths_are_those_that_the_served_context_holds(
    asked: tuple[int, ...] | None, context: int | None, chosen: tuple[int, ...]
) -> None:
    assert chosen_depths(asked, target(context_tokens=context), Shape()) == chosen


@pytest.mark.parametrize(
    ("asked", "context", "text"),
    [
        ((0, 7041, 9000), 8192, "a depth of 7,041 and 9,000 tokens is beyond the served context of 8,192"),
        ((0,), 512, "a depth of 0 tokens is beyond the served context of 512"),
        (None, 512, "a depth of 0 and 4,096 tokens is beyond the served context of 512"),
    ],
)
def test_a_depth_beyond_the_context_is_refused_by_name(asked: tuple[int, ...] | None, context: int, text: str) -> None:
    with pytest.raises(UsageError) as caught:
        chosen_depths(asked, target(context_tokens=context), Shape())
    assert text in caught.value.message
    assert caught.value.hint is not None
    assert ("7040" if context == 8192 else "--context") in caught.value.hint


@pytest.mark.parametrize(
    ("path", "quant"),
    [
        ("/m/Kimi-K3-UD-IQ1_M-00001-of-00015.gguf", "UD-IQ1_M"),
        ("C:\\models\\Kimi-K3-UD-IQ1_S.gguf", "UD-IQ1_S"),
        ("UD-IQ1_M.gguf", "UD-IQ1_M"),
        ("/m/Kimi-K3-XUD-IQ1_M.gguf", None),
        ("/m/other.gguf", None),
        (None, None),
    ],
)
def test_a_quant_is_known_by_its_files_name_or_not_at_all(path: str | None, quant: str | None) -> None:
    assert quant_in(path, QUANTS) == quant


def test_a_port_that_some_other_program_holds_is_no_machine_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """ssh -L listens on loopback for a server that is far away; this test's own process stands in for it."""
    with answering(Script(chunks=WORDS)) as server, BenchClient(server.url) as client:
        assert "may forward" in str(look_at(client, None, QUANTS).elsewhere)
        monkeypatch.setattr(bench_target, "_listener", lambda _port: None)
        assert "cannot be seen" in str(look_at(client, None, QUANTS).elsewhere)
    assert "network" in str(bench_target._process("http://10.0.0.9:8080", None)[1])


def test_a_placement_is_told_in_layers() -> None:
    layers = (*([LayerPlace(trunk=0, experts=None)] * 2), LayerPlace(trunk=0, experts=0))
    layout = Layout(devices=("gpu0",), layers=layers, head=0)
    assert placement_in_words(layout) == "trunk: 3 gpu0; experts: 1 gpu0, 2 host"


def test_prompts_are_never_the_same_twice() -> None:
    texts = {new_text(20) for _ in range(50)}
    assert len(texts) == 50
    assert {len(text.split()) for text in texts} == {20}


def report(**changes: Any) -> Report:
    timings = {"prompt_ms": 100.0, "prompt_n": 5, "predicted_n": 9, "prompt_per_second": 50.0}
    found = [
        by_the_server(timings | {"predicted_per_second": rate}, depth_tokens=0, warmth=Warmth.COLD, client_seconds=2.5)
        for rate in (4.0, 8.0)
    ]
    facts: dict[str, Any] = {
        "target": target(pid=7), "machine": Fingerprint(ram_bytes=1, cards=(Card(name="RTX", total_bytes=9),)),
        "found": found, "loaded": (),
        "peaks": Peaks(
            tree=TreeUse(resident_bytes=12, anonymous_bytes=9, file_bytes=3), read_bytes=5 << 30, cgroup="/k3",
            cgroup_bytes=20, devices=(DevicePeak(name="RTX", used_bytes=4, total_bytes=9),),
        ),
    }  # fmt: skip
    return make_report(**(facts | changes))


def test_what_a_reader_must_know_stands_beside_the_figures() -> None:
    told = report()
    assert any("2 of 2 requests waited" in line and "2 s" in line for line in told.notices)
    assert any("5.4 GB from disk" in line for line in told.notices)
    assert any("twice and more apart" in line for line in told.notices)
    assert told.why_not_kept is None
    run = to_run(told, "2026-11-30")
    assert run.note == "; ".join(told.notices)  # who sees the figures later must know it, too
    assert [(row.where, row.what, row.size_bytes) for row in run.memory] == [
        ("host", "resident", 12),
        ("host", "anonymous", 9),
        ("host", "mapped files", 3),
        ("host", "control group, page cache included", 20),
        ("gpu0 RTX", "in use by all", 4),
    ]
    data = to_data(told)
    assert data["memory"]["host"]["read_bytes"] == 5 << 30
    assert data["memory"]["devices"] == [{"name": "RTX", "used_bytes": 4, "total_bytes": 9}]


def test_a_slow_first_turn_is_told_also_where_each_kind_was_measured_once() -> None:
    """Seen on a machine that was busy: 1.9 tokens/s cold, 1,389 warm."""
    turns = [
        by_the_server(
            {"prompt_n": 5, "predicted_n": 9, "predicted_per_second": rate},
            depth_tokens=depth, warmth=warmth, client_seconds=None,
        )
        for depth, warmth, rate in ((0, Warmth.COLD, 1.9), (0, Warmth.WARM, 1389.0), (4096, Warmth.COLD, 1300.0))
    ]  # fmt: skip
    (notice,) = report(found=turns, peaks=Peaks()).notices
    assert "at depth 0 are twice and more apart" in notice
    steady = report(found=turns[1:], peaks=Peaks())
    assert steady.notices == ()
    assert to_run(steady, "2026-11-30").note is None


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"found": []}, "nothing was measured"),
        ({"target": target(model=MeasuredModel())}, "tells no quant"),
        ({"target": target(elsewhere="it is asked over a network"), "machine": None}, "which machine"),
        ({"machine": Fingerprint(ram_bytes=1)}, "accelerators of this machine are unknown"),
        ({"machine": Fingerprint(cards=())}, "memory or the accelerators"),
    ],
)
def test_figures_of_an_unknown_machine_are_not_kept(changes: dict[str, Any], why: str) -> None:
    assert why in str(report(**changes).why_not_kept)


def test_what_is_unknown_of_the_memory_is_told_with_its_reason() -> None:
    far = report(target=target(elsewhere="it is asked over a network"), peaks=Peaks())
    assert "memory: it is asked over a network" in far.unknown
    gone = report(peaks=Peaks())
    assert "memory: process 7 cannot be asked" in gone.unknown
    assert any("control group" in line for line in gone.unknown)
    silent = report(peaks=Peaks(tree=TreeUse(resident_bytes=1), devices=None))
    assert "memory of accelerators: no driver answered" in silent.unknown
