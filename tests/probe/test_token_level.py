import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_k3
from fakes.openai_endpoint import Refuse, Say, serve
from fakes.served import plan_for, served, small_model

from kimigguf.cli.app import App, run
from kimigguf.cli.show import Show
from kimigguf.errors import ExitCode
from kimigguf.probe.references import Prices
from kimigguf.probe.suites import load_suite
from kimigguf.probe.token_level import TOKENS, most_usd


def suite(folder: Path, count: int = 6) -> str:
    lines = [
        {"id": f"i{n}", "prompt": f"What is {n} + {n}?", "check": {"kind": "number", "value": 2 * n}}
        for n in range(count)
    ]
    path = folder / "sums.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return str(path)


def probe(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    code = run(["quality-probe", "--json", *arguments], App(show=Show(), environ={}))
    shown = capsys.readouterr()
    answer: dict[str, Any] = json.loads(shown.out)
    assert code == (ExitCode.ANSWERED_NO if answer["verdict"] in {"worse", "unknown"} else ExitCode.DONE)
    return answer


def shown(token: str, share: float = 0.9) -> dict[str, Any]:
    def one(text: str, probability: float) -> dict[str, Any]:
        return {"token": text, "bytes": list(text.encode()), "logprob": math.log(probability)}

    return {**one(token, share), "top_logprobs": [one(token, share), one("?", (1 - share) / 2)]}


def telling(tokens: str, share: float = 0.9) -> Callable[[dict[str, Any], int], Say]:
    return lambda _body, _number: Say(content="12", logprobs=tuple(shown(token, share) for token in tokens))


def test_both_sides_are_asked_greedily_and_a_killed_run_asks_nothing_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serve(telling("abcd")) as candidate, serve(telling("abxd", 0.8)) as reference:
        sides = ["--candidate", candidate.url, "--reference", reference.url, "--suite", suite(tmp_path)]
        words = [*sides, "--token-level", "4", "--out", str(tmp_path / "run")]
        found = probe(capsys, *words)["token_level"]
        asked = [body for body in candidate.bodies if body.get("logprobs")]
        assert len(asked) == 4
        assert {(body["temperature"], body["top_logprobs"], body["stream"]) for body in asked} == {(0.0, 10, False)}
        assert (found["pair"]["tokens"], found["pair"]["agreement"]) == (12, pytest.approx(2 / 3))
        assert found["noise"]["agreement"] == 1.0
        assert found["pair"]["divergence"] > 0.1
        calls = len(candidate.bodies) + len(reference.bodies)
        kept = tmp_path / "run" / "tokens.jsonl"
        kept.write_bytes(kept.read_bytes()[:-9])  # killed within the last line
        assert probe(capsys, *words)["token_level"] == found
        assert len(candidate.bodies) + len(reference.bodies) == calls + 1
        again = ["--reference-run", str(tmp_path / "run"), "--out", str(tmp_path / "next")]
        before = len(reference.bodies)
        assert probe(capsys, *sides, "--token-level", "4", *again)["token_level"] == found
        assert len(reference.bodies) == before


def test_what_is_kept_costs_nothing_more(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked, prices = suite(tmp_path), Prices(input_usd=0.0, output_usd=1e6 / TOKENS)
    loaded = load_suite(asked, {})
    assert most_usd(prices, loaded, 0) == 0
    assert most_usd(prices, loaded, 4) == most_usd(prices, loaded, 4, kept_in=(None, tmp_path)) == 8
    with serve(telling("abcd")) as candidate, serve(telling("abcd")) as reference:
        sides = ["--candidate", candidate.url, "--reference", reference.url, "--suite", asked]
        probe(capsys, *sides, "--token-level", "3", "--out", str(tmp_path / "run"))
    assert most_usd(prices, loaded, 3, kept_in=(None, tmp_path / "run")) == 0


def silent(body: dict[str, Any], _number: int) -> Say | Refuse:
    return Refuse(status=400, message="logprobs is not supported") if body.get("logprobs") else Say(content="12")


@pytest.mark.parametrize(
    ("answer", "why"), [(telling(""), "no log-probabilities"), (silent, "logprobs is not supported")]
)
def test_an_endpoint_without_log_probabilities_is_asked_once_and_is_unknown(
    answer: Callable[[dict[str, Any], int], Say | Refuse],
    why: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with serve(telling("abcd")) as candidate, serve(answer) as reference:
        sides = ["--candidate", candidate.url, "--reference", reference.url, "--suite", suite(tmp_path)]
        found = probe(capsys, *sides, "--token-level", "4")["token_level"]
        assert (found["pair"], found["noise"], found["reference"]) == (None, None, None)
        assert found["candidate"]["tokens"] == 16
        assert why in found["unknown"][0]
        assert sum(bool(body.get("logprobs")) for body in reference.bodies) == 2  # once for each of its arms


@pytest.mark.engine
def test_two_quants_of_a_k3_hold_other_tokens_for_likely_and_each_is_itself(
    tiny: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plans = [
        plan_for(sorted(tiny(quant).glob("*.gguf")), "kimi-k3", tiny_k3.LAYERS) for quant in ("UD-IQ1_M", "UD-Q2_K_XL")
    ]
    asked = suite(tmp_path, 2)
    with served(plans[0], tmp_path / "one") as candidate, served(plans[1], tmp_path / "two") as reference:
        sides = ["--candidate", candidate, "--reference", reference, "--suite", asked, "--max-tokens", "4"]
        found = probe(capsys, *sides, "--token-level", "2")["token_level"]
    assert found["unknown"] == []
    assert found["noise"]["agreement"] == 1.0
    assert found["noise"]["divergence"] < 0.01
    assert found["noise"]["tokens"] > 30
    assert found["pair"]["agreement"] < 0.9
    assert found["pair"]["divergence"] > 0.05
    assert found["candidate"]["likeliest"] == 1.0


@pytest.mark.engine
def test_a_small_model_holds_what_it_holds_both_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with served(plan_for(small_model(), "llama", 30), tmp_path / "one") as url:
        sides = ["--candidate", url, "--reference", url, "--suite", suite(tmp_path, 1), "--max-tokens", "2"]
        found = probe(capsys, *sides, "--token-level", "1")["token_level"]
    assert found["unknown"] == []
    assert (found["pair"]["agreement"], found["noise"]["agreement"]) == (1.0, 1.0)
    assert found["pair"]["divergence"] < 0.001
    assert -1 < found["reference"]["mean_logprob"] < 0  # a model that knows what it says
