"""Known reference endpoints as data (``profiles/references``), and what asking them costs."""

import json
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias
from urllib.parse import urlsplit

from kimigguf import profile_files
from kimigguf.engines.command import is_loopback
from kimigguf.errors import MachineError, UsageError
from kimigguf.probe.suites import Item, Suite
from kimigguf.whole_file import write_whole

Agree: TypeAlias = Callable[[float | None, str], bool]
"""Given the most that it can cost, in US dollars (None where nobody knows), and who is paid."""
_KIND = "references"
_TEMPLATE_TOKENS = 300
"""More than a chat template adds to a short conversation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """An endpoint to judge by. Prices are US dollars per million tokens, None where nobody has written them down.

    ``temperature``: the only one it takes. ``key_variable``: the environment variable its key is usually kept in.
    """

    name: str
    url: str
    title: str = ""
    model: str | None = None
    key_variable: str | None = None
    usd_per_million_input: float | None = None
    usd_per_million_output: float | None = None
    temperature: float | None = None
    sources: tuple[str, ...] = ()
    checked: str | None = None

    @property
    def prices(self) -> "Prices | None":
        if self.usd_per_million_input is None or self.usd_per_million_output is None:
            return None
        return Prices(input_usd=self.usd_per_million_input, output_usd=self.usd_per_million_output)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """US dollars per million tokens."""

    input_usd: float
    output_usd: float

    def cost(self, prompt_tokens: int, completion_tokens: int) -> float:
        """US dollars for that many tokens."""
        return (prompt_tokens * self.input_usd + completion_tokens * self.output_usd) / 1e6

    def most(self, item: Item, max_tokens: int) -> float:
        """The most that asking an item once can cost: a token is at least one byte of what is sent."""
        said = sum(len(f"{message.content}{message.thinking}{message.calls}".encode()) for message in item.conversation)
        tools = sum(len(f"{tool.name}{tool.description}{json.dumps(tool.parameters)}".encode()) for tool in item.tools)
        prompt = said + tools + _TEMPLATE_TOKENS
        return self.cost(prompt, max_tokens)


FREE: Final = Prices(input_usd=0.0, output_usd=0.0)


def find_reference(text: str, environ: Mapping[str, str]) -> Reference:
    """The known endpoint of that name or address, else ``text`` as an address of which nothing is known.

    Raises:
        UsageError: ``bad-profile``; ``unknown-reference`` for a word that is neither a known name nor an address.
    """
    names = profile_files.names(_KIND, environ)
    if text in names:
        return profile_files.read(_KIND, text, Reference, environ)
    if re.fullmatch(r"[\w-]+", text) and text != "localhost":
        raise UsageError(
            f"there is no known endpoint {text!r}",
            code="unknown-reference",
            hint=f"known are {', '.join(names)}; any other by its address, such as https://api.example.org/v1 or :8081",
        )
    # Whoever writes out the address of a known endpoint is billed by it all the same.
    known = (profile_files.read(_KIND, name, Reference, environ) for name in names)
    return next((one for one in known if _place(one.url) == _place(text)), Reference(name=text, url=text))


def _place(url: str) -> tuple[str, str]:
    """Host with port, and path, however the address is written."""
    try:
        parts = urlsplit(url if "://" in url else f"//{url}")
    except ValueError:  # no address: whoever calls it says so
        return "", url
    return parts.netloc.lower(), parts.path.rstrip("/").removesuffix("/v1")


def prices_within(known: Reference, who: str, budget_usd: float | None, environ: Mapping[str, str]) -> Prices | None:
    """What it charges; None where nobody has written that down and there is no budget to hold.

    A server of this machine that has no profile charges nothing: it is somebody's own.

    Raises:
        UsageError: ``no-price`` where there is a budget.
    """
    if known.prices is not None or budget_usd is None:
        return known.prices
    if known.name == known.url and is_loopback(_host(known)):
        return FREE
    raise UsageError(
        f"nobody has written down what {who} charges, so no budget can be held",
        code="no-price",
        hint=price_hint(known, environ),
    )


def price_hint(known: Reference, environ: Mapping[str, str]) -> str:
    """Which file to write so that an endpoint has its prices, and all that stands in it."""
    name = known.name if known.name != known.url else re.sub(r"[^\w.-]", "-", _host(known))
    url = re.sub(r"^(\w+://)?[^/]*@", r"\1", known.url)  # a key in an address is refused later on, and not repeated
    keys = {"name": name, "url": url, "model": known.model, "key_variable": known.key_variable}
    lines = [f'{key} = "{value}"' for key, value in keys.items() if value is not None]
    if known.temperature is not None:
        lines.append(f"temperature = {known.temperature}")
    lines += ["usd_per_million_input = ...", "usd_per_million_output = ..."]
    path = profile_files.own_folder(_KIND, environ) / f"{name}.toml"
    return f"write its prices in US dollars for the dots into {path}:\n" + "\n".join(lines)


def check_key(known: Reference, variable: str, environ: Mapping[str, str]) -> None:
    """Refuse to ask an endpoint that is known to want a key where there is none; ``variable`` is the role's own.

    Raises:
        UsageError: ``no-key``.
    """
    if known.key_variable is None or environ.get(known.key_variable) or environ.get(variable):
        return
    raise UsageError(
        f"{known.key_variable} is not set, and {known.title or known.name} answers nobody without a key",
        code="no-key",
        hint=f"export {known.key_variable}=... (or {variable}=...)",
    )


def agree_to_unknown(asked: Mapping[str, Reference | None], environ: Mapping[str, str], agree: Agree) -> None:
    """An endpoint that takes a key may charge; without a price only its user can say that it may.

    ``asked`` holds the endpoints by the variable that a key for their role is kept in.

    Raises:
        UsageError: ``cost-not-agreed``.
    """
    unpriced = [
        one
        for variable, one in asked.items()
        if one is not None and one.prices is None and (one.key_variable or _has_key(one, environ.get(variable)))
    ]
    if unpriced and not agree(None, unpriced[0].name):
        raise UsageError(
            f"nobody has written down what {unpriced[0].name} charges, and an unknown cost was not agreed to",
            code="cost-not-agreed",
            hint="add --yes; or " + price_hint(unpriced[0], environ),
        )


def _has_key(one: Reference, key: str | None) -> bool:
    return bool(key) and not is_loopback(_host(one))


def _host(one: Reference) -> str:
    """Where it is; an address without a host, such as ``:8081``, is this machine."""
    return urlsplit(f"//{_place(one.url)[0]}").hostname or "127.0.0.1"


def check_temperature(reference: Reference, temperature: float | None) -> None:
    """Refuse a temperature that the reference would refuse, before anything is asked.

    Raises:
        UsageError: ``temperature-pinned``.
    """
    if temperature is not None and reference.temperature not in {None, temperature}:
        raise UsageError(
            f"{reference.title or reference.name} takes no temperature but {reference.temperature}",
            code="temperature-pinned",
            hint="leave --temperature out",
        )


def most_usd(prices: Prices, suite: Suite, max_tokens: int, calls: int) -> float:
    """The most that ``calls`` calls, spread evenly over the suite's items, can cost if none is asked again."""
    one_round = sum(prices.most(item, item.max_tokens or max_tokens) * (1 + len(item.results)) for item in suite.items)
    return one_round * calls / len(suite.items)


class Purse:
    """A budget that several threads spend from: what a call may cost is set aside before it is made.

    What is spent is written to ``record``, and an interrupted run that goes on starts from there. A call that was
    under way when it was killed counts as all it might have cost: nobody knows what the endpoint has charged.
    """

    def __init__(self, prices: Prices, budget_usd: float | None, *, record: Path | None = None) -> None:
        """Raises UsageError (``bad-run``) where ``record`` is none."""
        self.prices = prices
        self.spent_usd = spent_before(record)
        self._budget = budget_usd
        self._aside = 0.0
        self._record = record
        self._problem: MachineError | None = None
        self._lock = threading.Lock()

    def hold_to(self, usd: float) -> None:
        """Spend no more from here on than what was agreed to, where there is no budget."""
        self._budget = self.spent_usd + usd if self._budget is None else self._budget

    def set_aside(self, usd: float) -> bool:
        """Keep the most that a call may cost; false where the budget does not hold it any more.

        Raises:
            MachineError: ``cannot-write`` where what was spent before could not be written down: then no more is spent.
        """
        with self._lock:
            if self._problem is not None:
                raise self._problem
            if self._budget is not None and self.spent_usd + self._aside + usd > self._budget:
                return False
            self._aside += usd
            self._problem = self._written()
            if self._problem is not None:
                self._aside -= usd
                raise self._problem
            return True

    def settle(self, aside_usd: float, cost_usd: float | None) -> None:
        """Replace what was set aside by what the call cost; None (no count came back) counts as all of it.

        Never raises: there may be a reply, which has been paid for.
        """
        with self._lock:
            self._aside -= aside_usd
            self.spent_usd += aside_usd if cost_usd is None else cost_usd
            self._problem = self._written()

    def _written(self) -> MachineError | None:
        if self._record is None:
            return None
        try:
            write_whole(self._record, json.dumps({"spent_usd": self.spent_usd, "under_way_usd": self._aside}).encode())
        except OSError as error:
            return MachineError(
                "what was spent cannot be written down", code="cannot-write", cause=error.strerror, hint="df -h ."
            )
        return None


SPENT: Final = "spent.json"
SPENT_ON_JUDGE: Final = "spent-on-judge.json"


def spent_before(record: Path | None) -> float:
    """US dollars in the record of a purse, what was under way included.

    Raises:
        UsageError: ``bad-run`` where it is none.
    """
    if record is None:
        return 0.0
    try:
        found = json.loads(record.read_bytes())
        return float(found["spent_usd"]) + float(found["under_way_usd"])
    except FileNotFoundError:
        return 0.0
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{record} is no record of this program", code="bad-run", hint="choose another --out DIR"
        ) from error
