import html
import html.parser
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from fakes.browser import browser

from kimigguf.probe.calls import Arm, Call, Fault, FaultKind, Outcome, Reply, Sent, Trial
from kimigguf.probe.client import Endpoint
from kimigguf.probe.cost import Costs, SideCosts, economics
from kimigguf.probe.judge import Better, Opinion, Pair
from kimigguf.probe.logprobs import token_level
from kimigguf.probe.page import page
from kimigguf.probe.score import score, solved
from kimigguf.probe.suites import Item, Number, PythonTest, Suite

EVIL = '<script>alert(1)</script> & "quotes" </pre></details>'


def reply(content: str) -> Reply:
    return Reply(
        content=content,
        thinking="",
        finish_reason="stop",
        tool_calls=0,
        prompt_tokens=5,
        completion_tokens=11,
        first_token_seconds=0.5,
        seconds=1.5,
        max_tokens=None,
    )


def opinion(item: str, pair: Pair, better: Better, *, reference_first: bool = True, said: str = "") -> Opinion:
    return Opinion(item=item, repeat=0, pair=pair, reference_first=reference_first, better=better, said=said,
                   prompt_tokens=9, completion_tokens=9)  # fmt: skip


def made(count: int = 40, *, evil: str = "", opinions: Sequence[Opinion] = ()) -> str:
    items = [Item(id=f"i{n}", prompt=f"{n}? {evil}", check=Number(value=n), category=f"c{n % 3}") for n in range(count)]
    suite = Suite(name="sums", items=tuple(items), sha256="0" * 64)
    fault = Fault(kind=FaultKind.RATE_LIMIT, status=429, text=f"slow down {evil}", tries=3)
    calls = []
    for n in range(count):
        outcomes: dict[Arm, Outcome] = {
            Arm.CANDIDATE: fault if n == 7 else reply(f"the answer {evil} is {n if n % 4 else 777}"),
            Arm.REFERENCE: reply(f"it is {n}"),
            Arm.REFERENCE_AGAIN: reply(f"it is {n}"),
        }
        calls += [Call(arm=arm, item=f"i{n}", repeat=0, outcome=outcome) for arm, outcome in outcomes.items()]
    scores = score(suite, calls, tolerance=0.05)
    return page(
        scores,
        suite,
        calls,
        candidate=Endpoint(role="candidate", url="http://127.0.0.1:8080/v1", model=f"kimi-k3 {evil}"),
        reference=Endpoint(role="reference", url="https://api.example.org/v1", model="kimi-k3"),
        settings={"suite_sha256": "0" * 64, "max_tokens": None},
        judged="JUDGED by j1" if opinions else None,
        opinions=opinions,
    )


class Seen(html.parser.HTMLParser):
    """Tags as a browser would see them, and whether they close in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.counts: dict[str, int] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1
        if tag not in {"meta", "link", "input", "rect", "line", "circle"}:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_every_item_stands_on_the_page_with_both_answers() -> None:
    seen = Seen()
    text = made()
    seen.feed(text)
    assert seen.open == []
    assert seen.counts["details"] == 40
    assert text.count('<circle class="dot"') == 6  # three metrics, and the right answers of three categories
    assert text.count('<circle class="one"') == 4 * (40 + 40 + 39)  # what was measured of every reply
    assert "rate-limit after 3 tries" in text
    assert "<del>the</del>" in text
    assert "api.example.org" in text


def test_nothing_that_an_endpoint_says_becomes_markup() -> None:
    seen = Seen()
    text = made(12, evil=EVIL)
    seen.feed(text)
    assert seen.counts["script"] == 1
    assert seen.counts["details"] == 12
    assert "<script>alert" not in text
    assert "alert(1)" in text


def test_the_page_asks_for_nothing_from_anywhere() -> None:
    text = made(4)
    assert "default-src 'none'" in text
    assert re.findall(r"(?:src|href)\s*=\s*[\"']?(?!data:)[^\"' >]+", text) == []
    assert "@import" not in text
    assert "url(" not in text


def test_a_page_without_any_interval_says_so() -> None:
    assert "too few answers for any interval" in made(1)


def test_costs_and_tokens_stand_on_the_page_where_somebody_asked_for_them() -> None:
    item = Item(id="i0", prompt="0?", check=Number(value=0))
    suite = Suite(name="sums", items=(item,), sha256="0" * 64)
    calls = [Call(arm=arm, item="i0", repeat=0, outcome=reply("0")) for arm in Arm]
    costs = Costs(candidate=SideCosts(usd_per_hour=2.4))
    told = {"candidate": {"name": "a.gguf"}, "reference": {"name": None}, "meaning": "near <lossless>"}
    bare = score(suite, calls, tolerance=0.05)
    full = replace(
        bare,
        economics=economics(calls, solved(suite, calls), costs, None, parallel=1),
        tokens=token_level({}, {}, {}),
    )
    one, other = (Endpoint(role=role, url=f"http://{role}/v1", model="k3") for role in ("candidate", "reference"))
    text = page(full, suite, calls, candidate=one, reference=other, settings={}, exact=told)
    assert "What a solved task costs" in text
    assert "$0.00100" in text  # 1.5 s of 2.40 an hour
    assert "unknown: candidate: it gave no answer" in text
    assert "exactly, a.gguf against a reference&#x27;s logits: near &lt;lossless&gt;" in text
    unpriced = replace(bare, economics=economics(calls, solved(suite, calls), Costs(), None, parallel=1))
    without = page(unpriced, suite, calls, candidate=one, reference=other, settings={})
    assert "What a solved task costs" not in without
    assert "Token by token" not in without


TEXT = "document.documentElement.innerText"
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
SHOWN = """[...document.querySelectorAll("#items details")].filter((item) => item.checkVisibility()).length"""


def chosen(text: str, wanted: str) -> str:
    """Type and choose, as a reader would; how many items are then shown."""
    return f"""(() => {{
      search.value = {text!r}; search.dispatchEvent(new Event("input"));
      filter.value = {wanted!r}; filter.dispatchEvent(new Event("change"));
      return {SHOWN}; }})()"""


def test_a_browser_shows_it_on_any_screen_and_on_paper_without_asking_anyone(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text(made(12, evil=EVIL), encoding="utf-8")
    with browser(tmp_path) as tab:
        tab.open(path)
        assert "12 of 12" in tab.evaluate(TEXT)  # the script ran
        for width in (360, 768, 1280):
            tab.look(width=width)
            assert tab.evaluate(OVERFLOW) <= 0, f"{width} px wide: the page has to be pushed sideways"
        tab.look(width=900)
        light = tab.evaluate("getComputedStyle(document.body).backgroundColor")
        tab.look(width=900, dark=True)
        assert (light, tab.evaluate("getComputedStyle(document.body).backgroundColor")) == (
            "rgb(255, 255, 255)", "rgb(21, 23, 26)",
        )  # fmt: skip
        assert tab.evaluate("getComputedStyle(document.querySelector('svg text')).fill") == "rgb(237, 238, 240)"
        assert tab.printed().startswith(b"%PDF")
        assert tab.evaluate("[...document.querySelectorAll('#items details')].every((item) => item.open)")
        tab.look(width=900, medium="print")
        assert tab.evaluate("getComputedStyle(document.querySelector('.tools')).display") == "none"
        assert [url for url in tab.requests if not url.startswith(("file:", "data:"))] == []
        assert tab.complaints == []


def test_a_reader_finds_an_item_by_words_and_by_what_became_of_it(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text(made(40), encoding="utf-8")
    with browser(tmp_path) as tab:
        tab.open(path)
        assert tab.evaluate(SHOWN) == 40
        assert tab.evaluate(chosen("I13", "")) == 1
        assert tab.evaluate(chosen("", "c-wrong")) == 10  # each fourth one
        assert tab.evaluate(chosen("", "none")) == 1  # the one that was not answered
        assert tab.evaluate(chosen("slow down", "")) == 1
        assert tab.evaluate(chosen("slow down", "c-wrong")) == 0
        assert "0 of 40" in tab.evaluate(TEXT)
        assert tab.complaints == []


def test_a_judges_words_are_folded_into_their_item_and_count_as_none(tmp_path: Path) -> None:
    opinions = [
        opinion("i3", Pair.CANDIDATE, Better.CHALLENGER, said=f"B is kinder. {EVIL}"),
        opinion("i3", Pair.CANDIDATE, Better.TIE, reference_first=False),
        opinion("i3", Pair.NOISE, Better.REFERENCE),
    ]
    path = tmp_path / "report.html"
    path.write_text(made(8, evil=EVIL, opinions=opinions), encoding="utf-8")
    with browser(tmp_path) as tab:
        tab.open(path)
        assert tab.evaluate(SHOWN) == 8
        assert tab.evaluate(chosen("B is kinder", "")) == 1
        assert tab.evaluate(
            "[...document.querySelectorAll('#items details details summary')].map(e => e.textContent)"
        ) == [
            "the judge on the reference (A) and the candidate (B): the candidate",
            "the judge on the candidate (A) and the reference (B): tie",
            "the judge on the reference (A) and the reference's second answer (B): the reference",
        ]
        assert "As a judge sees it" in tab.evaluate(TEXT)
        assert tab.complaints == []
    assert "As a judge sees it" not in made(2)


def test_a_long_question_is_shown_by_its_ends_and_a_failed_program_says_why() -> None:
    item = Item(id="long", prompt="first" + "x" * 500_000 + "last", check=PythonTest(code=""))
    suite = Suite(name="long", items=(item,), sha256="0" * 64)
    trial = Trial(passed=False, why="NameError: <name> is not defined")
    calls = [Call(arm=arm, item="long", repeat=0, outcome=replace(reply("x"), tested=trial)) for arm in Arm]
    side = Endpoint(role="candidate", url="http://127.0.0.1:8080/v1", model="k3")
    text = page(score(suite, calls, tolerance=0.05), suite, calls, candidate=side, reference=side, settings={})
    assert len(text) < 60_000
    assert "user: first" in text
    assert "xlast</pre>" in text
    assert "480,015 characters are not shown" in text
    assert "its program: NameError: &lt;name&gt; is not defined" in text


def test_the_head_says_when_and_how_it_was_asked_and_settings_are_words() -> None:
    suite = Suite(
        name="sums", items=(Item(id="i0", prompt="0?", check=Number(value=0)),), sha256="0" * 64, max_tokens=4096
    )
    began = ("2026-11-29T23:59:58Z", "2026-11-30T00:00:02Z", "2026-11-30T00:00:09Z")
    calls = [
        Call(arm=arm, item="i0", repeat=0, outcome=replace(reply("0"), requests=(Sent(began=when, body={}),)))
        for arm, when in zip(Arm, began, strict=True)
    ]
    side = Endpoint(role="candidate", url="http://127.0.0.1:8080/v1", model="k3")
    settings = {
        "candidate": ["http://127.0.0.1:8080/v1", "k3"], "candidate_file": "K3-UD-IQ1_M.gguf", "candidate_build": None,
        "max_tokens": None, "temperature": None, "seed": None, "candidate_context_tokens": 4096,
    }  # fmt: skip
    scores = score(suite, calls, tolerance=0.05)
    text = html.unescape(page(scores, suite, calls, candidate=side, reference=side, settings=settings))
    assert (
        "2026-11-29 to 2026-11-30; suite sums, 1 question; 1 round; temperature: each one's own; "
        "most tokens of an answer: 4,096 (the suite's); candidate's file: K3-UD-IQ1_M.gguf</p>"
    ) in text
    for row in ("candidate</td><td>k3 at http://127.0.0.1:8080/v1", "build</td><td>unknown", "tokens</td><td>4,096",
                "max tokens</td><td>4,096 (the suite's)", "seed</td><td>the suite's"):  # fmt: skip
        assert row in text
    assert "['http" not in text
    warm = page(replace(scores, temperature=0.0, repeats=3), suite, (), candidate=side, reference=side, settings={})
    assert '<p class="soft">suite sums, 1 question; 3 rounds; temperature: 0; most' in warm


def test_a_category_shows_both_times_that_the_reference_was_asked() -> None:
    items = tuple(Item(id=f"i{n}", prompt=f"{n}?", check=Number(value=n), category="sums") for n in range(5))
    suite = Suite(name="sums", items=items, sha256="0" * 64)
    calls = [
        Call(arm=arm, item=f"i{n}", repeat=0, outcome=reply(str(n) if n or arm is Arm.REFERENCE else "777"))
        for n in range(5)
        for arm in Arm
    ]
    scores = score(suite, calls, tolerance=0.05)
    side = Endpoint(role="candidate", url="http://c/v1", model="k3")
    text = page(scores, suite, calls, candidate=side, reference=side, settings={})
    cells = re.findall(r"<td>(\d of 5), ", text)
    assert cells == ["4 of 5", "5 of 5", "4 of 5", "4 of 5"]
    assert next(one.reference for one in scores.metrics) == pytest.approx(0.9)
    assert "the mean of both times it was asked" in text
    assert text.count('the second time <span class="wrong">') == 1
