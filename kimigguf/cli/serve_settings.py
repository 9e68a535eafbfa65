"""``serve --explain``: every setting that an engine is given, why it has its value, and who decides it."""

import json
import shlex
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from kimigguf.cli.show import Show
from kimigguf.errors import ExitCode

if TYPE_CHECKING:
    from rich.console import Console

    from kimigguf.engines.serving import ServingProfile

_WHOLE: Final = "https://github.com/ggml-org/llama.cpp/issues/27872"
_PLACED: Final = (
    ("model", "--model", "FILE", "files", "the first shard; the engine finds the others by their names", "llama.cpp"),
    ("devices", "--device", "NAMES", "layout", "the accelerators that the plan uses, none where it uses none", _WHOLE),
    ("layers", "--n-gpu-layers", "N", "layout", "how many layers, counted from the last, lie on accelerators", _WHOLE),
    ("split", "--tensor-split", "N,N", "layout", "the layers on each, where there are several", _WHOLE),
    ("tensors", "--override-tensor", "RULES", "layout", "which experts and single tensors lie elsewhere", _WHOLE),
)
"""What the plan lays out: name, flag, the value's form, the plan's part, reason and source."""


def show_settings(show: Show, environ: Mapping[str, str]) -> int:
    """Every setting that a Kimi K3 engine is given by default, with its reason and where that comes from."""
    from kimigguf.engines.serving import DEFAULT, load_serving

    profile = load_serving(DEFAULT, environ)
    records = [*_placed(), *_chosen(profile), *_settings(profile)]
    settings = [{key: record[key] for key in record if key not in {"given", "by"}} for record in records]
    data = {
        "schema": "kimigguf.settings/1",
        "profile": profile.name,
        "alias": profile.alias,
        "effort": profile.effort,
        "settings": settings,
    }

    def human(console: "Console") -> None:
        for record in records:
            planned = (
                "  (the plan's)" if record["from_plan"] else f"  (decided by {record['by']})" if record["by"] else ""
            )
            agent = "" if record["agent"] is None else f"  ({record['agent']} with --agent)"
            given = record["given"] or f"not given: {record['flag']}"
            console.print(f"{given}{planned}{agent}", style="bold", markup=False)
            console.print(f"    {record['reason']} [{record['source']}]", markup=False)

    show.answer(data, human)
    return ExitCode.DONE


def _placed() -> Iterator[dict[str, Any]]:
    for name, flag, form, part, reason, source in _PLACED:
        yield _record(name, flag, None, reason, source, given=f"{flag} {form}", from_plan=part)


def _chosen(profile: "ServingProfile") -> Iterator[dict[str, Any]]:
    """What options of ``serve`` decide, and its defaults."""
    from kimigguf.engines.command import DEFAULT_PORT, LOOPBACK
    from kimigguf.engines.serving import chat_template_arguments

    template = json.dumps(chat_template_arguments(profile, None), separators=(",", ":"))
    alone = "only this machine reaches it; any other address needs a key"
    by_file = "a key in the command line could be read by every user of this machine"
    effort = "the thinking effort, in every spelling that a template reads"
    yield _record("host", "--host", LOOPBACK, alone, "kimigguf", by="--host")
    yield _record("port", "--port", DEFAULT_PORT, "llama-server's own default", "llama-server --help", by="--port")
    yield _record("alias", "--alias", profile.alias, "the model's name for clients", "kimigguf", by="--alias")
    yield _record("keys", "--api-key-file", None, by_file, "kimigguf", by="--api-key-file or --new-api-key")
    yield _record("effort", "--chat-template-kwargs", template, effort, "models/templates/Kimi-K3.jinja", by="--effort")


def _settings(profile: "ServingProfile") -> Iterator[dict[str, Any]]:
    """What the profile says, with the plan's values where it takes them from there."""
    from kimigguf.engines.command import flag_words, setting_values
    from kimigguf.memory.settings import Settings

    for setting, value in zip(profile.settings, setting_values(profile, Settings()), strict=True):
        yield _record(
            setting.name,
            setting.flag,
            value,
            setting.reason,
            setting.source,
            given=shlex.join(flag_words(setting, value)),
            agent=setting.agent,
            from_plan=setting.from_plan,
        )


def _record(
    name: str,
    flag: str,
    value: object,
    reason: str,
    source: str,
    *,
    given: str | None = None,
    agent: object = None,
    from_plan: str | None = None,
    by: str | None = None,
) -> dict[str, Any]:
    """One row as JSON values; ``given`` and ``by``, the options that change it, are for people."""
    if given is None:
        given = "" if value is None else shlex.join((flag, str(value)))
    return {
        "name": name,
        "flag": flag,
        "value": value,
        "agent": agent,
        "from_plan": from_plan,
        "reason": reason,
        "source": source,
        "given": given,
        "by": by,
    }
