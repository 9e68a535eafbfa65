import hashlib
import json
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fakes.openai_endpoint import Refuse, Say, serve

from kimigguf.events import ignore
from kimigguf.probe.calls import Reply
from kimigguf.probe.client import Asker, Settings
from kimigguf.probe.sent import MOST_BYTES, brief
from kimigguf.probe.session import Request, probe
from kimigguf.probe.suites import Item, Tool, ToolResult

KEYS = {"KIMIGGUF_CANDIDATE_API_KEY": "key-of-the-candidate", "KIMIGGUF_REFERENCE_API_KEY": "key-of-the-reference"}


def suite(folder: Path, *prompts: str) -> str:
    path = folder / "own.jsonl"
    path.write_text("".join(json.dumps({"id": f"i{n}", "prompt": text}) + "\n" for n, text in enumerate(prompts)))
    return str(path)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_call_in_the_log_holds_what_was_sent_and_when_and_never_a_key(tmp_path: Path) -> None:
    out, before = tmp_path / "run", datetime.now(UTC)
    with serve(lambda _b, _n: Say(content="4")) as candidate, serve(lambda _b, _n: Say(content="4")) as reference:
        request = Request(candidate=candidate.url, reference=reference.url, suite=suite(tmp_path, "2+2?", "3+1?"),
                          max_tokens=32, out=out)  # fmt: skip
        probe(request, KEYS, agree=lambda *_: True, listen=ignore)
    sent = [one for row in rows(out / "calls.jsonl") for one in row["outcome"]["requests"]]
    assert len(sent) == 6

    def order(body: dict[str, Any]) -> str:
        return json.dumps(body, sort_keys=True)

    received = sorted([*candidate.bodies, *reference.bodies], key=order)
    assert sorted((one["body"] for one in sent), key=order) == received
    for one in sent:
        began = datetime.fromisoformat(one["began"])
        assert began.utcoffset() is not None
        assert before.replace(microsecond=0) <= began <= datetime.now(UTC)
    whole = "".join(path.read_text() for path in out.iterdir())
    assert "key-of-the" not in whole
    assert "Authorization" not in whole


def test_a_long_conversation_is_named_and_not_repeated_in_the_log(tmp_path: Path) -> None:
    text = "naïve " * 8000
    with serve(lambda _b, _n: Say(content="4")) as candidate:
        request = Request(candidate=candidate.url, reference=candidate.url, suite=suite(tmp_path, text), out=tmp_path)
        probe(request, {}, agree=lambda *_: True, listen=ignore)
        sent = candidate.bodies[0]
    (body,) = {json.dumps(one["body"]) for row in rows(tmp_path / "calls.jsonl") for one in row["outcome"]["requests"]}
    kept, messages = json.loads(body), sent["messages"]
    told = json.dumps(messages, ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode()
    assert kept == {**sent, "messages": {"item": "i0", "sha256": hashlib.sha256(told).hexdigest()}}
    assert any(row.get("id") == "i0" and row["prompt"] == text for row in rows(tmp_path / "questions.jsonl"))


def test_a_body_at_the_bound_is_kept_whole() -> None:
    def of(size: int) -> bytes:
        empty = len(b'{"messages": []}')
        return b'{"messages": [' + b" " * (size - empty) + b"]}"

    assert brief(of(MOST_BYTES), "i") == {"messages": []}
    assert brief(of(MOST_BYTES + 1), "i")["messages"]["item"] == "i"


def test_a_run_whose_log_is_older_than_the_requests_goes_on_and_asks_nothing_twice(tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    with serve(lambda _b, _n: Say(content="4")) as candidate:
        request = Request(candidate=candidate.url, reference=candidate.url, suite=suite(tmp_path, "2+2?", "3+1?"),
                          out=tmp_path)  # fmt: skip
        before = probe(request, {}, agree=lambda *_: True, listen=ignore)
        old = rows(path)
        for row in old:
            del row["outcome"]["requests"]
        path.write_text("".join(json.dumps(row) + "\n" for row in old[:4]))
        asked = len(candidate.bodies)
        again = probe(request, {}, agree=lambda *_: True, listen=ignore)
        assert len(candidate.bodies) == asked + 2
    assert again.answer["metrics"] == before.answer["metrics"]
    assert [len(row["outcome"].get("requests", ())) for row in rows(path)] == [0, 0, 0, 0, 1, 1]


def test_the_judges_and_the_token_levels_logs_hold_their_requests_too(tmp_path: Path) -> None:
    letters, out = tmp_path / "letters.jsonl", tmp_path / "run"
    check = {"kind": "rubric", "rubric": "Kind."}
    letters.write_text(json.dumps({"id": "i0", "prompt": "A letter.", "check": check}))
    place = {"token": "a", "bytes": [97], "logprob": -0.1}
    said = Say(content="kind", logprobs=({**place, "top_logprobs": [place]},))
    with serve(lambda _b, _n: said) as candidate, serve(lambda _b, _n: Say(content="VERDICT: TIE")) as judge:
        request = Request(candidate=candidate.url, reference=candidate.url, suite=str(letters), judge=judge.url,
                          max_tokens=32, token_level=1, out=out)  # fmt: skip
        probe(request, {}, agree=lambda *_: True, listen=ignore)
        opinions = [one["body"] for row in rows(out / "judged.jsonl")[1:] for one in row["requests"]]
        assert sorted(map(str, opinions)) == sorted(map(str, judge.bodies))
        assert opinions
        beginnings = [one["body"] for row in rows(out / "tokens.jsonl") for one in row["text"]["requests"]]
        assert beginnings == [body for body in candidate.bodies if body.get("logprobs")]
        assert len(beginnings) == 3
        asked = len(judge.bodies) + len(candidate.bodies)
        for name in ("judged.jsonl", "tokens.jsonl"):
            old = rows(out / name)
            for row in old:
                row.get("text", row).pop("requests", None)
            (out / name).write_text("".join(json.dumps(row) + "\n" for row in old))
        probe(request, {}, agree=lambda *_: True, listen=ignore)
        assert len(judge.bodies) + len(candidate.bodies) == asked


def test_failed_tries_and_the_turns_of_a_tool_loop_are_requests_too() -> None:
    def answer(_body: dict[str, Any], number: int) -> Say | Refuse:
        if number == 0:
            return Refuse(status=500)
        return Say(calls=(("stock", "{}"),), finish_reason="tool_calls") if number == 1 else Say(content="7 saws")

    tool = Tool(name="stock", description="What is in store.", parameters={"type": "object"})
    item = Item(id="saws", prompt="How many?", tools=(tool,), results=(ToolResult(name="stock", content="7"),))
    with (
        serve(answer) as endpoint,
        closing(Asker("candidate", endpoint.url, {}, Settings(tries=2), sleep=lambda _s: None)) as asker,
    ):
        reply = asker.ask(asker.endpoint(None), item, 64)
        assert isinstance(reply, Reply)
        assert [one.body for one in reply.requests] == endpoint.bodies
        assert [len(one.body["messages"]) for one in reply.requests] == [1, 1, 3]
        again = asker.ask(asker.endpoint(None), item, 64)
        assert isinstance(again, Reply)
        assert len(again.requests) == 1  # nothing of the call before
