import contextlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes.openai_endpoint import Endpoint, Refuse, Say, serve

from kimigguf import profile_files
from kimigguf.errors import NetworkError, UsageError
from kimigguf.events import ignore
from kimigguf.probe.calls import FaultKind
from kimigguf.probe.references import Prices, Purse, Reference, agree_to_unknown, find_reference, prices_within
from kimigguf.probe.session import Finding, Request, probe
from kimigguf.probe.suites import Item, Tool


def test_the_shipped_references_load_and_name_their_sources() -> None:
    names = profile_files.names("references", {})
    assert {"kimi", "openrouter"} <= set(names)
    for name in names:
        found = find_reference(name, {})
        assert found.sources
        assert found.key_variable
        assert found.url.startswith("https://")


def test_anything_else_is_an_address() -> None:
    assert find_reference("http://127.0.0.1:1", {}).url == "http://127.0.0.1:1"
    assert find_reference("http://127.0.0.1:1", {}).prices is None


@pytest.mark.parametrize("address", ["https://api.moonshot.ai/v1", "https://API.moonshot.ai", "api.moonshot.ai/v1/"])
def test_a_known_endpoint_is_known_by_its_address_too(address: str) -> None:
    """Its price, its pinned temperature and its key's variable are no less true where its address is written out."""
    assert find_reference(address, {}) == find_reference("kimi", {})
    assert find_reference("http://[", {}).url == "http://["


@pytest.mark.parametrize(
    ("url", "key", "asks"),
    [
        ("https://api.example.org/v1", "sk-1", True),
        ("https://api.example.org/v1", "", False),
        ("http://127.0.0.1:8081", "sk-1", False),
        (":8081", "sk-1", False),
    ],
)
def test_who_is_asked_with_a_key_may_charge(url: str, key: str, *, asks: bool) -> None:
    offered: list[float | None] = []

    def refuse(usd: float | None, _who: str) -> bool:
        offered.append(usd)
        return False

    asked = {"KIMIGGUF_REFERENCE_API_KEY": find_reference(url, {})}
    with pytest.raises(UsageError) if asks else contextlib.nullcontext():
        agree_to_unknown(asked, {"KIMIGGUF_REFERENCE_API_KEY": key}, refuse)
    assert offered == ([None] if asks else [])


def test_a_purse_sets_aside_before_it_pays() -> None:
    purse = Purse(Prices(input_usd=1, output_usd=10), budget_usd=1.0)
    assert purse.set_aside(0.6)
    assert not purse.set_aside(0.6)
    purse.settle(0.6, 0.1)
    assert purse.set_aside(0.6)
    purse.settle(0.6, None)
    assert purse.spent_usd == pytest.approx(0.7)


def test_a_price_is_per_million_tokens() -> None:
    assert Prices(input_usd=3, output_usd=15).cost(1_000_000, 100_000) == pytest.approx(4.5)


Priced = Callable[[Endpoint], dict[str, str]]


@pytest.fixture
def priced(tmp_path: Path) -> Callable[[Endpoint], dict[str, str]]:
    """An environment in which the loopback reference is known as ``paid``, a dollar a thousand tokens out."""

    def environ(reference: Endpoint) -> dict[str, str]:
        folder = tmp_path / "profiles" / "references"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "paid.toml").write_text(
            f'name = "paid"\nurl = "{reference.url}"\nmodel = "k3"\nkey_variable = "PAID_KEY"\n'
            "usd_per_million_input = 0\nusd_per_million_output = 1000\ntemperature = 1.0\n"
        )
        return {"KIMIGGUF_PROFILES": str(tmp_path / "profiles"), "PAID_KEY": "secret"}

    return environ


def asked(environ: dict[str, str], candidate: Endpoint, tmp_path: Path, **told: Any) -> Finding:
    suite = tmp_path / "sums.jsonl"
    items = [{"id": f"i{n}", "prompt": f"{n}+{n}?", "check": {"kind": "number", "value": 2 * n}} for n in range(10)]
    suite.write_text("\n".join(map(json.dumps, items)))
    agree = told.pop("agree", lambda *_: False)
    request = Request(candidate=candidate.url, reference="paid", suite=str(suite), max_tokens=100, **told)
    return probe(request, environ, agree=agree, listen=ignore)


def sums(body: dict[str, Any], _number: int) -> Say:
    return Say(content=str(2 * int(body["messages"][0]["content"].split("+")[0])))


def test_nothing_is_asked_before_the_cost_is_agreed_to(priced: Priced, tmp_path: Path) -> None:
    offered: list[float] = []

    def refuse(usd: float, _who: str) -> bool:
        offered.append(usd)
        return False

    with serve(sums) as candidate, serve(sums) as reference:
        with pytest.raises(UsageError) as error:
            asked(priced(reference), candidate, tmp_path, agree=refuse)
        assert error.value.code == "cost-not-agreed"
        assert offered == [pytest.approx(2 * 10 * 100 / 1000)]
        assert candidate.bodies == reference.bodies == []


def test_what_was_spent_is_told_and_the_key_comes_from_the_profiles_variable(priced: Priced, tmp_path: Path) -> None:
    with serve(sums) as candidate, serve(sums) as reference:
        found = asked(priced(reference), candidate, tmp_path, agree=lambda *_: True)
        assert set(reference.keys) == {"Bearer secret"}
        assert set(candidate.keys) == {"Bearer none"}
    cost = found.answer["cost"]
    assert cost["spent_usd"] == 0.02  # twenty answers of one token
    assert cost["reference"]["usd_per_solved_task"] == pytest.approx(0.001)
    assert cost["candidate"]["usd_per_solved_task"] is None


def test_a_budget_is_never_exceeded_and_what_was_not_sent_is_told(priced: Priced, tmp_path: Path) -> None:
    def long(_body: dict[str, Any], _number: int) -> Say:
        return Say(content=" ".join(["4"] * 80))

    with serve(sums) as candidate, serve(long) as reference:
        found = asked(priced(reference), candidate, tmp_path, budget_usd=0.5, parallel=4)
        assert len(reference.bodies) * 0.08 <= 0.5
        assert len(reference.bodies) >= 4
    faults = [arm.faults.get(FaultKind.BUDGET, 0) for arm in found.scores.arms]
    assert faults[0] == 0
    assert sum(faults) == 20 - len(reference.bodies)
    assert found.answer["cost"]["spent_usd"] <= 0.5


def test_a_run_that_goes_on_spends_from_what_is_left_of_its_budget(priced: Priced, tmp_path: Path) -> None:
    out = tmp_path / "probe"

    def long(_body: dict[str, Any], _number: int) -> Say:
        return Say(content=" ".join(["4"] * 80))

    with serve(sums) as candidate, serve(long) as reference:
        environ = priced(reference)
        first = asked(environ, candidate, tmp_path, budget_usd=0.5, out=out)
        asked_once = len(reference.bodies)
        again = asked(environ, candidate, tmp_path, budget_usd=0.5, out=out)
        assert asked_once == len(reference.bodies) > 0
        assert (
            again.answer["cost"]["spent_usd"] == first.answer["cost"]["spent_usd"] == pytest.approx(0.08 * asked_once)
        )
        record = out / "spent.json"
        assert json.loads(record.read_text())["under_way_usd"] == 0
        # Killed while two calls were under way: the endpoint may have charged for them.
        record.write_text(json.dumps({"spent_usd": 0.08 * asked_once, "under_way_usd": 0.2}))
        more = asked(environ, candidate, tmp_path, budget_usd=1.0, out=out)
    assert (len(reference.bodies) - asked_once) * 0.08 + 0.08 * asked_once + 0.2 <= 1.0
    assert more.answer["cost"]["spent_usd"] == pytest.approx(0.08 * len(reference.bodies) + 0.2)


def test_a_purse_whose_record_is_something_else_is_refused(tmp_path: Path) -> None:
    record = tmp_path / "spent.json"
    record.write_text("[]")
    with pytest.raises(UsageError) as error:
        Purse(Prices(input_usd=1, output_usd=10), 1.0, record=record)
    assert error.value.code == "bad-run"


def test_what_was_agreed_to_is_not_exceeded_where_answers_are_asked_for_again(priced: Priced, tmp_path: Path) -> None:
    """An answer that is cut off while thinking is asked for once more, with four times the room."""
    offered: list[float] = []

    def accept(usd: float, _who: str) -> bool:
        offered.append(usd)
        return True

    def thinks(body: dict[str, Any], _number: int) -> Say:
        return Say(thinking=" ".join(["hm"] * body["max_tokens"]), finish_reason="length")

    with serve(sums) as candidate, serve(thinks) as reference:
        found = asked(priced(reference), candidate, tmp_path, agree=accept)
    assert offered[0] * 0.5 < found.answer["cost"]["spent_usd"] <= offered[0]


def test_a_refused_request_costs_nothing(priced: Priced, tmp_path: Path) -> None:
    def answer(body: dict[str, Any], number: int) -> Say | Refuse:
        return Refuse(status=400) if body["messages"][0]["content"] > "5" else sums(body, number)

    with serve(sums) as candidate, serve(answer) as reference:
        found = asked(priced(reference), candidate, tmp_path, budget_usd=5.0)
    assert found.answer["cost"]["spent_usd"] == pytest.approx(0.01)


def test_a_budget_without_a_price_and_another_temperature_are_refused(priced: Priced, tmp_path: Path) -> None:
    with serve(sums) as candidate, serve(sums) as reference:
        environ = priced(reference)
        with pytest.raises(UsageError) as error:
            asked(environ, candidate, tmp_path, temperature=0.2)
        assert error.value.code == "temperature-pinned"
        request = Request(candidate=candidate.url, reference="https://api.example.org/v1", budget_usd=1.0)
        with pytest.raises(UsageError) as error:
            probe(request, {}, agree=lambda *_: True, listen=ignore)
        assert error.value.code == "no-price"


def test_a_reference_of_unknown_price_is_asked_only_where_its_user_agrees_and_never_within_a_budget() -> None:
    comet = find_reference("comet", {})
    assert (comet.url, comet.model, comet.key_variable) == (
        "https://api.cometapi.com/v1",
        "kimi-k3",
        "COMETAPI_API_KEY",
    )
    assert comet.prices is None
    offered: list[float | None] = []

    def refuse(usd: float | None, _who: str) -> bool:
        offered.append(usd)
        return False

    with serve(sums) as candidate:
        for budget, code in ((5.0, "no-price"), (None, "cost-not-agreed")):
            request = Request(candidate=candidate.url, reference="comet", max_tokens=64, budget_usd=budget)
            with pytest.raises(UsageError) as error:
                probe(request, {"COMETAPI_API_KEY": "k"}, agree=refuse, listen=ignore)
            assert error.value.code == code
        assert candidate.bodies == []
    assert offered == [None]


def test_tools_that_are_sent_are_counted_in_what_a_question_may_cost() -> None:
    prices = Prices(input_usd=1_000_000, output_usd=0)
    tool = Tool(name="f", description="d" * 5000, parameters={"type": "object"})
    assert prices.most(Item(id="a", prompt="?", tools=(tool,)), 1) > prices.most(Item(id="a", prompt="?"), 1) + 5000


@pytest.mark.parametrize("judge", [False, True])
def test_a_key_that_is_not_set_is_missed_before_anything_is_asked(
    priced: Priced, tmp_path: Path, *, judge: bool
) -> None:
    with serve(sums) as candidate, serve(sums) as reference:
        environ = priced(reference) | {"PAID_KEY": ""}
        suite = tmp_path / "open.jsonl"
        suite.write_text(json.dumps({"id": "a", "prompt": "1+1?", "check": {"kind": "rubric", "rubric": "two"}}))
        request = Request(candidate=candidate.url, reference="paid", suite=str(suite), max_tokens=9)
        if judge:
            request = replace(request, reference=reference.url, judge="paid")
        with pytest.raises(UsageError, match="PAID_KEY is not set") as error:
            probe(request, environ, agree=lambda *_: True, listen=ignore)
        assert error.value.code == "no-key"
        assert "export PAID_KEY=" in str(error.value.hint)
        assert candidate.bodies == reference.bodies == []


def test_a_folder_that_a_run_without_a_key_left_does_not_hide_the_missing_key(priced: Priced, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    with serve(sums) as candidate, serve(sums) as reference:
        environ = priced(reference)
        with pytest.raises(UsageError, match="PAID_KEY is not set"):
            asked(environ | {"PAID_KEY": ""}, candidate, tmp_path, out=out, agree=lambda *_: True)
        assert candidate.bodies == reference.bodies == []
        asked(environ, candidate, tmp_path, out=out, agree=lambda *_: True)
        made = len(reference.bodies)
        again = asked(environ | {"PAID_KEY": ""}, candidate, tmp_path, out=out)
        assert (made, len(reference.bodies), again.answer["verdict"]) == (20, 20, "not-enough-samples")


def test_whoever_sends_a_key_over_a_network_without_tls_is_told_first() -> None:
    said: list[str] = []
    with serve(sums) as candidate:
        request = Request(candidate=candidate.url, reference="http://nowhere.invalid:9/v1", reference_model="k3")
        environ = {"KIMIGGUF_REFERENCE_API_KEY": "secret"}
        with pytest.raises(NetworkError):
            probe(request, environ, agree=lambda *_: True, listen=lambda event: said.append(str(event)))
    assert "the key goes to nowhere.invalid:9 unencrypted" in said[0]


def test_who_is_paid_is_named_when_leave_to_spend_is_asked_for(priced: Priced, tmp_path: Path) -> None:
    named: list[str] = []

    def refuse(_usd: float, who: str) -> bool:
        named.append(who)
        return False

    with (
        serve(sums) as candidate,
        serve(sums) as reference,
        pytest.raises(UsageError, match="paid may charge up to"),
    ):
        asked(priced(reference), candidate, tmp_path, agree=refuse)
    assert named == ["paid"]


def test_a_server_of_ones_own_needs_no_price_for_a_budget(tmp_path: Path) -> None:
    suite = tmp_path / "sums.jsonl"
    suite.write_text('{"id": "i1", "prompt": "1+1?", "check": {"kind": "number", "value": 2}}')  # bounds no answer
    with serve(sums) as candidate, serve(sums) as reference:
        request = Request(candidate=candidate.url, reference=reference.url, suite=str(suite), budget_usd=1.0)
        found = probe(request, {}, agree=lambda *_: False, listen=ignore)
    assert (len(reference.bodies), found.answer["cost"]["spent_usd"]) == (2, 0.0)
    here = Reference(name="gateway", url="http://127.0.0.1:4000/v1")  # whoever gives it a profile may be charged
    with pytest.raises(UsageError):
        prices_within(here, "it", 1.0, {})


@pytest.mark.parametrize(
    ("asked", "file"),
    [
        ("comet", "comet.toml"),
        ("https://api.example.org/v1", "api.example.org.toml"),
        ("[2001:db8::1]:80", "2001-db8--1.toml"),
    ],
)
def test_what_is_missing_for_a_budget_can_be_written_as_it_is_said(asked: str, file: str, tmp_path: Path) -> None:
    environ = {"KIMIGGUF_PROFILES": str(tmp_path)}
    before = find_reference(asked, environ)
    with pytest.raises(UsageError) as error:
        prices_within(before, asked, 1.0, environ)
    first, _, lines = (error.value.hint or "").partition("\n")
    assert first == f"write its prices in US dollars for the dots into {tmp_path / 'references' / file}:"
    (tmp_path / "references").mkdir()
    (tmp_path / "references" / file).write_text(lines.replace("...", "2.5"))
    after = find_reference(asked, environ)
    assert prices_within(after, asked, 1.0, environ) == Prices(input_usd=2.5, output_usd=2.5)
    assert (after.url, after.model, after.key_variable) == (before.url, before.model, before.key_variable)


@pytest.mark.parametrize("asked", ["https://me:sk-secret@api.example.org/v1", "me:sk-secret@api.example.org"])
def test_a_key_in_an_address_is_not_repeated(asked: str) -> None:
    with pytest.raises(UsageError) as error:
        prices_within(find_reference(asked, {}), "it", 1.0, {})
    assert "sk-secret" not in (error.value.hint or "")


def test_a_word_that_is_no_known_name_lists_those_that_are() -> None:
    with pytest.raises(UsageError) as error:
        find_reference("openai", {})
    assert error.value.code == "unknown-reference"
    assert error.value.hint is not None
    assert error.value.hint.startswith("known are comet, kimi, openrouter; any other by its address")
    assert find_reference("localhost", {}).url == "localhost"
