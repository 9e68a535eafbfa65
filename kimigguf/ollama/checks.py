"""Whether a registration may begin: every look as PASSED, FAILED or UNKNOWN with its evidence. Pure."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

from kimigguf.download.named import not_here
from kimigguf.engines.doctor import missing_marker
from kimigguf.errors import IntegrityError, KimiggufError, MachineError, NetworkError, UsageError
from kimigguf.ollama.disk import KEEPS_SHARDS_TEXT, Way
from kimigguf.ollama.evidence import Blame, Check, State, blocked, passed, unknown
from kimigguf.ollama.listing import full_name
from kimigguf.ollama.modelfile import slow_load_seconds
from kimigguf.ollama.server import K3_VERSION_TEXT, OllamaServer
from kimigguf.ollama.source import Source
from kimigguf.ollama.storage import ModelsFolder, ServerEnvironment
from kimigguf.ollama.ways import Candidate, Route
from kimigguf.ollama.workplace import Workplace
from kimigguf.units import duration, storage

_K3: Final = "kimi-k3"
_NAME: Final = re.compile(r"(?:[A-Za-z0-9][\w.-]{0,79}/){0,2}[A-Za-z0-9_][\w.-]{0,79}(?::[A-Za-z0-9_][\w.-]{0,79})?")
_SPLIT: Final = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_NO_DISK: Final = "it costs no disk to run it beside Ollama, and Ollama's clients reach it too: kimigguf serve"
_UPGRADE: Final = "curl -fsSL https://ollama.com/install.sh | sh"
_DEFAULT_LOAD_SECONDS: Final = 300.0
"""Ollama's own patience with a load."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """All that is known before anything is written. ``taken`` holds the server's model names, None: not asked.

    ``installed``: an ``ollama`` is on PATH. ``already``: the model of that name is the one that would be registered.
    ``hindrance`` is why the files cannot be linked, ``work`` where the set can be merged.
    """

    name: str
    force: bool
    source: Source
    server: OllamaServer
    installed: bool
    settings: ServerEnvironment
    folder: ModelsFolder | None
    taken: frozenset[str] | None
    already: bool
    chosen: Candidate
    hindrance: str | None
    work: Workplace | None
    context_tokens: int


def judge(facts: Facts) -> tuple[Check, ...]:
    """All checks, in the order in which a reader wants them."""
    return (
        *_server(facts),
        *_quant(facts.source),
        _files(facts.source),
        *_template(facts.source),
        _name(facts),
        *_disk(facts),
        *_settings(facts),
    )


def error_for(check: Check) -> KimiggufError:
    """The failure that a blocking check stands for."""
    kinds: Mapping[Blame, type[KimiggufError]] = {
        Blame.REQUEST: UsageError,
        Blame.MACHINE: MachineError,
        Blame.NETWORK: NetworkError,
        Blame.FILES: IntegrityError,
    }
    return kinds[check.blame](check.evidence, code=check.code, cause=check.cause, hint=check.hint)


def unreachable(server: OllamaServer, *, installed: bool) -> Check:
    """The check that a server which does not answer fails; ``installed``: an ``ollama`` is on PATH to start it with."""
    if server.local and not installed:
        return blocked(
            "Ollama",
            f"{server.reason}; no ollama is on PATH",
            code="ollama-unreachable",
            hint=_UPGRADE,
            blame=Blame.MACHINE,
        )
    return blocked(
        "Ollama",
        server.reason,
        code="ollama-unreachable",
        hint="ollama serve" if server.local else "set OLLAMA_HOST to the address of your Ollama",
        blame=Blame.MACHINE if server.local else Blame.NETWORK,
    )


def _server(facts: Facts) -> Iterator[Check]:
    server = facts.server
    if not server.reachable:
        yield unreachable(server, installed=facts.installed)
        return
    yield passed("Ollama", f"{server.url} answers")
    if facts.source.architecture not in {_K3, None}:
        yield unknown("version", f"{server.version}; which one loads {facts.source.architecture} is not known")
    elif server.supports_k3 is False:
        yield blocked("version", server.reason, code="ollama-too-old", hint=f"install a newer one: {_UPGRADE}")
    elif server.supports_k3 is None:
        yield unknown(
            "version", server.reason, f"K3 needs {K3_VERSION_TEXT}; a build from source may be older or newer"
        )
    else:
        yield passed("version", server.reason)
    if server.local:
        yield passed("where it runs", "on this machine")
    elif facts.source.files and facts.chosen.need.send_bytes == 0:
        yield passed("where it runs", "elsewhere, and it has every shard already")
    else:
        yield blocked(
            "where it runs",
            f"{server.url} is not this machine: it lacks our files, and its disk cannot be seen from here",
            code="ollama-remote",
            hint=f"run this on the machine where Ollama runs: kimigguf ollama-register {facts.source.pasted}",
        )


def _quant(source: Source) -> Iterator[Check]:
    if source.quant is not None and source.quant.engine.min_build is None:
        reason, way = source.quant.engine.reason, source.quant.engine.alternative
        yield blocked(
            "quant",
            f"{source.quant.name} runs on no Ollama: {reason or 'mainline llama.cpp cannot read it'}",
            code="quant-unsupported",
            hint=f"use {way}" if way else "choose another: kimigguf recommend",
            blame=Blame.REQUEST,
        )
    elif source.unread_tensors:
        yield blocked(
            "tensor types",
            f"{source.unread_tensors} tensors are of types that mainline llama.cpp, and so Ollama, does not know",
            code="quant-unsupported",
            hint="choose another quant: kimigguf recommend",
            blame=Blame.REQUEST,
        )


def _files(source: Source) -> Check:
    if not source.files:
        absent = not_here(source.label, source.folder, hint=f"kimigguf download {source.pasted}")
        check = blocked("files", absent.message, code=absent.code, hint=str(absent.hint), blame=Blame.FILES)
        return replace(check, cause=absent.cause)
    if source.unreadable:
        return blocked(
            "files",
            f"this user may not read {', '.join(source.unreadable)}",
            code="unreadable-shard",
            hint=f"sudo chmod a+r {source.pasted_folder}/*.gguf",
        )
    odd = _odd_files(source)
    if odd is not None:
        evidence, code, hint = odd
        return blocked("files", evidence, code=code, hint=hint, blame=Blame.REQUEST)
    count = f"{len(source.files)} shards" if len(source.files) > 1 else "one file"
    return passed("files", f"{count}, {storage(source.size_bytes)}, in {source.folder}")


def _odd_files(source: Source) -> tuple[str, str, str] | None:
    """What Ollama would stumble over in the folder, as evidence, code and hint."""
    folder = source.pasted_folder
    if source.links:
        return (
            f"{source.links[0]} is a symbolic link, as in a Hugging Face cache; Ollama needs real files",
            "symlinked-shards",
            f"kimigguf import {folder} links it, then name the quant; or: cp -L {folder}/* FOLDER",
        )
    if source.projectors:
        return (
            f"{source.projectors[0]} lies among the shards; Ollama would take it for a part of the model",
            "projector-among-shards",
            f"mv {folder}/*mmproj*.gguf {folder}/..",
        )
    if len(source.files) > 1 and not all(_SPLIT.fullmatch(file.name) for file in source.files):
        return (
            f"{source.files[0].name} is not named NAME-00001-of-0000N.gguf, which Ollama asks of the shards of a set",
            "shard-names",
            "give the shards the names they were published under",
        )
    return None


def _template(source: Source) -> Iterator[Check]:
    if not source.files or source.unreadable:
        return
    if source.template is None:
        yield unknown(
            "template",
            "the first shard carries no chat template, and none is made up here: Ollama would send bare text",
            f"kimigguf verify {source.pasted_folder}",
        )
    elif source.architecture == _K3 and missing_marker(source.template) is not None:
        yield unknown("template", "it is not K3's format: thinking and tool calls would stay plain text")
    else:
        yield passed(
            "template", f"the first shard carries its own ({len(source.template):,} characters), and it is kept"
        )


def _name(facts: Facts) -> Check:
    name = facts.name
    if not _NAME.fullmatch(name):
        return blocked(
            "name", f"{name!r} is no name for a model", code="bad-name", hint="--name kimi-k3:mine", blame=Blame.REQUEST
        )
    if facts.taken is None:
        return unknown("name", f"{name}; whether it is taken could not be asked")
    if full_name(name).lower() not in {taken.lower() for taken in facts.taken}:
        return passed("name", f"{name} is free")
    if facts.force:
        return passed("name", f"{name} is taken and will be replaced (--force)")
    if facts.already:
        return passed("name", f"{name} is registered already, with these very files and parameters")
    return blocked(
        "name",
        f"Ollama has a model {name} already",
        code="name-taken",
        hint=f"give another --name, or replace it: kimigguf ollama-register {facts.source.pasted} --name {name} --force"
        f"; if it is this quant, prove it: kimigguf ollama-register --check {name}",
        blame=Blame.REQUEST,
    )


def _disk(facts: Facts) -> Iterator[Check]:
    folder, need = facts.folder, facts.chosen.need
    if not facts.server.local:
        return
    if folder is None or folder.free_bytes is None:
        text = "where Ollama keeps its models could not be found, so nothing is known of the space there"
        if facts.force:
            yield unknown("models folder", f"{text}; going on (--force)")
        else:
            yield blocked(
                "models folder", text, code="ollama-folder-unknown", state=State.UNKNOWN,
                hint=f"OLLAMA_MODELS=FOLDER kimigguf ollama-register {facts.source.pasted}, or go on with --force",
            )  # fmt: skip
        return
    where = f"{folder.path} ({folder.source})"
    if folder.confirmed:
        yield passed("models folder", f"{where}; the server has what lies there")
    else:
        yield unknown("models folder", f"{where}; nothing lies there yet that the server could be asked for")
    if facts.hindrance is None:
        yield passed("link", "files become blobs without a copy: as clones where the file system can, else hard links")
    else:
        yield unknown("link", f"files are sent: {facts.hindrance}")
    yield _space(facts, folder)
    if facts.work is not None and need.work_bytes:
        yield _work_space(facts, facts.work)


def _space(facts: Facts, folder: ModelsFolder) -> Check:
    need = facts.chosen.need
    text = f"{storage(folder.free_bytes)} free, {storage(need.peak_bytes)} needed at the peak: {_why(facts.chosen)}"
    if not facts.chosen.short_bytes:
        return passed("space", text)
    ways = [f"{_NO_DISK} {facts.source.pasted} --ollama-api"]
    if need.way is Way.MERGE:
        less = storage(need.send_bytes) if need.send_bytes else "nothing"
        ways.append(f"Ollama {KEEPS_SHARDS_TEXT} or later needs {less} more ({_UPGRADE})")
    return blocked(
        "space",
        f"{storage(facts.chosen.short_bytes)} of disk are missing on {folder.path}: {text}",
        code="ollama-no-space",
        hint="; or ".join(ways),
    )


def _work_space(facts: Facts, work: Workplace) -> Check:
    need, short = facts.chosen.need, facts.chosen.work_short_bytes
    text = (
        f"{storage(work.free_bytes)} free in {work.folder}, {storage(need.work_bytes)} needed to merge the shards there"
    )
    if not short:
        return passed("merge folder", text)
    return blocked(
        "merge folder",
        f"{storage(short)} of disk are missing: {text}",
        code="ollama-no-space",
        hint=f"{_NO_DISK} {facts.source.pasted} --ollama-api; or make room there",
    )


def _why(chosen: Candidate) -> str:
    need = chosen.need
    if chosen.route is Route.MERGED:
        size = storage(need.settled_bytes)
        if need.present_bytes:
            return f"Ollama has the merged {size}"
        return f"{size} merged first, then linked" if chosen.link else f"{size} merged first, then sent and removed"
    sent = f"{storage(need.send_bytes)} of shards to copy" if need.send_bytes else "no shard to copy"
    if need.linked_bytes:
        sent = f"{storage(need.linked_bytes)} of shards linked, which takes no disk"
    if need.present_bytes:
        sent += f" ({storage(need.present_bytes)} are there)"
    if need.way is not Way.MERGE:
        return f"{sent}, none merged"
    merging = f"twice {storage(need.settled_bytes)} while Ollama merges them (until {KEEPS_SHARDS_TEXT} it does)"
    return f"{sent}, and {merging}"


def _settings(facts: Facts) -> Iterator[Check]:
    """What the server's own settings mean for a model of this size; none of it stops anything."""
    seconds = slow_load_seconds(facts.source.size_bytes)
    text = f"a load of {storage(facts.source.size_bytes)} may take {duration(seconds)} from a slow disk"
    values, source = facts.settings.values, facts.settings.source
    if source is None or not facts.server.local:
        yield unknown("load time-out", f"the server's settings cannot be read; the default is 5 min, and {text}")
    elif "OLLAMA_LOAD_TIMEOUT" in values:
        yield passed("load time-out", f"OLLAMA_LOAD_TIMEOUT={values['OLLAMA_LOAD_TIMEOUT']} ({source}); {text}")
    elif seconds <= _DEFAULT_LOAD_SECONDS:
        yield passed("load time-out", f"OLLAMA_LOAD_TIMEOUT is not set ({source}), so 5 min; {text}")
    else:
        yield unknown("load time-out", f"OLLAMA_LOAD_TIMEOUT is not set ({source}), so 5 min; {text}")
    yield from _limits(values, facts.context_tokens)


def _limits(values: Mapping[str, str], context_tokens: int) -> Iterator[Check]:
    slots = values.get("OLLAMA_NUM_PARALLEL")
    if slots is not None and slots not in {"0", "1"}:
        yield unknown("parallel", f"OLLAMA_NUM_PARALLEL={slots}: each slot holds 443 MiB of state and its checkpoints")
    length = values.get("OLLAMA_CONTEXT_LENGTH")
    if length is not None and length != str(context_tokens):
        yield passed("context", f"the model's own {context_tokens:,} tokens go before OLLAMA_CONTEXT_LENGTH={length}")
    kind = values.get("OLLAMA_KV_CACHE_TYPE")
    if kind is not None and kind != "f16":
        yield unknown(
            "KV cache", f"OLLAMA_KV_CACHE_TYPE={kind}: K3's takes 27,648 B per token at f16, so it saves little"
        )
    if values.get("OLLAMA_NOPRUNE") not in {None, "", "0", "false"}:
        yield unknown("pruning", "OLLAMA_NOPRUNE is set: a restart removes no blob, also none that no model names")
