"""The exact comparison of two local models: llama.cpp's own perplexity tool, over one text, token by token.

The reference runs first and leaves its logits in a file; the candidate is then held against that file. So only one of
them is in memory at a time, one reference serves any number of candidates, and the file can come from another machine.
"""

import json
import random
import re
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from kimigguf.download import disk
from kimigguf.engines.command import engine_environ
from kimigguf.engines.diagnose import bare, server_error
from kimigguf.engines.discover import places
from kimigguf.engines.report import beside
from kimigguf.engines.supervise import Child
from kimigguf.errors import IntegrityError, MachineError, UsageError
from kimigguf.events import Listener, Step
from kimigguf.gguf_file.header import SkippedArray
from kimigguf.gguf_file.shards import ShardSet, find_set, read_set
from kimigguf.probe import kept_logits
from kimigguf.probe.divergence import HEADER_BYTES, Divergence, Logits, in_words, parse, ratio_note, read_header
from kimigguf.probe.suites import Suite

_TOOL: Final = "llama-perplexity"
_BYTES_PER_TOKEN: Final = 1.5
"""Fewer than this no tokenizer makes of text; more only costs the tool a longer text than it uses."""
CONTEXT_TOKENS: Final = 512
CHUNKS: Final = 20
_LEAST_SCORED: Final = 100
"""The tool makes no statistics of fewer tokens (build 11434)."""
_LOOK_EVERY_SECONDS: Final = 1.0
_TRIES: Final = 3
"""llama.cpp does not wait for its own log when it ends (common/log.cpp says so), and the last lines are what we want.

On a busy machine a small model is gone before they are written; a large one takes longer to free than they do to write.
"""
SCHEMA: Final = "kimigguf.quality-exact/1"
FILE: Final = "exact.json"
"""The name of the answer in a run's folder, where reports look for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to compare. ``logits`` is where the reference's are kept, or lie; None: nowhere longer than needed.

    ``text`` is what both read, None where ``logits`` holds it. ``context_tokens`` and ``chunks`` are what ``logits``
    has, or else 512 and 20, where they are None. ``arguments`` are handed on to the tool, for placement.
    """

    candidate: Path
    reference: Path | None
    text: str | None
    logits: Path | None = None
    context_tokens: int | None = None
    chunks: int | None = None
    arguments: tuple[str, ...] = ()
    engine_path: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Exact:
    """The comparison. ``reference`` is None where its logits came from a file that nobody said anything of."""

    candidate: str
    candidate_bytes: int
    reference: str | None
    logits: Logits
    tool: str
    divergence: Divergence

    @property
    def sentence(self) -> str:
        """The finding in words."""
        found = self.divergence
        return (
            f"the same likeliest token for {found.same_top.mean:.1%} (± {found.same_top.error:.1%}) of "
            f"{self.logits.scored_tokens:,} tokens; mean divergence {found.mean.mean:.4f} (± {found.mean.error:.4f}) "
            f"nats, {in_words(found.mean.mean)}"
        )


def compare(request: Request, environ: Mapping[str, str], listen: Listener) -> Exact:
    """Run the tool for the reference, unless its logits are there, and then for the candidate.

    Raises:
        UsageError: A model or text cannot be meant, the two models do not share a vocabulary, or (``other-logits``) the
            kept logits are not of what is asked for.
        MachineError: ``no-perplexity-tool``, ``disk-full``, ``cannot-write``.
        IntegrityError: ``bad-logits``; or a model's files are no set.
        ServerError: The tool died.
    """
    candidate = read_set(find_set(request.candidate))
    program = _tool(environ, request.engine_path)
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kimigguf-exact-")))
        run = _Runs(program=program, environ=environ, arguments=request.arguments, work=work, listen=listen)
        logits = request.logits or work / "reference.logits"
        if kept := logits.exists():
            source = None
        else:
            source = _make_logits(run, request, _reference(request, candidate), logits)
        known = _checked(logits, candidate)
        if kept:
            source = kept_logits.check(logits, known, _wanted(request))
        listen(Step(text=f"holding {_name(candidate)} against the reference over {known.scored_tokens:,} tokens"))
        words = ["--model", str(_first(request.candidate)), "--ctx-size", str(known.context_tokens)]
        found = _statistics(run, [*words, "--kl-divergence", "--kl-divergence-base", str(logits)])
    return Exact(
        candidate=_name(candidate),
        candidate_bytes=candidate.size_bytes,
        reference=None if source is None else source.reference,
        logits=known,
        tool=str(program),
        divergence=found,
    )


def suite_text(suite: Suite) -> str:
    """The suite's questions as one text, in an order that mixes its kinds and is always the same."""
    parts = ["\n".join(message.content for message in item.conversation) for item in suite.items]
    random.Random(suite.sha256).shuffle(parts)  # noqa: S311 -- an order, not a secret
    return "\n\n".join(parts)


def record(exact: Exact) -> dict[str, Any]:
    """The answer as JSON."""
    return {
        "schema": SCHEMA,
        "candidate": {"name": exact.candidate, "size_bytes": exact.candidate_bytes},
        "reference": {"name": exact.reference},
        "tool": exact.tool,
        **asdict(exact.logits),
        "scored_tokens": exact.logits.scored_tokens,
        **asdict(exact.divergence),
        "meaning": exact.sentence,
        "note": ratio_note(exact.divergence),
    }


def write(folder: Path, answer: Mapping[str, Any]) -> None:
    """Keep the answer in a run's folder.

    Raises:
        MachineError: ``cannot-write``.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FILE).write_text(json.dumps(answer, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise MachineError(
            f"cannot write to {folder}", code="cannot-write", cause=error.strerror, hint="choose another --out DIR"
        ) from error


def read(folder: Path) -> dict[str, Any] | None:
    """The answer that was kept in a run's folder; None if there is none that can be read."""
    try:
        answer = json.loads((folder / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return answer if isinstance(answer, dict) and answer.get("schema") == SCHEMA else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Runs:
    """Runs the tool, telling how far it is; what it printed comes back."""

    program: Path
    environ: Mapping[str, str]
    arguments: Sequence[str]
    work: Path
    listen: Listener

    def __call__(self, what: str, argv: Sequence[str]) -> str:
        bare, _dropped = engine_environ(self.environ)
        with Child.start([str(self.program), *argv, *self.arguments], bare, self.work / f"{what}.log") as child:
            while (how := child.wait(_LOOK_EVERY_SECONDS)) is None:
                pass  # a Ctrl-C is heard between two looks; how long a load takes, nobody knows
            output = child.log_tail()
        if how.code != 0:
            raise server_error(output, how, log_path=None, while_doing=f"the {what} read the text")
        return output


def _statistics(run: _Runs, argv: Sequence[str]) -> Divergence:
    output = ""
    for _ in range(_TRIES):
        output = run("candidate", argv)
        if (found := parse(output)) is not None:
            return found
    raise MachineError(
        f"{run.program} gave no statistics that kimigguf can read",
        code="no-statistics",
        cause=_complaint(output),
        hint=f"{shlex.quote(str(run.program))} --version",
    )


def _tool(environ: Mapping[str, str], engine_path: Path | None) -> Path:
    for place, _, _ in places(environ, engine_path):
        program = place / "llama-server" if place.is_dir() else place
        if (found := beside(program, _TOOL)) is not None:
            return found
    raise MachineError(
        f"there is no {_TOOL} beside any llama.cpp found here",
        code="no-perplexity-tool",
        cause="the embedded engine has none; it comes with llama.cpp itself",
        hint="scripts/build_engine makes one; name its folder with --engine-path",
    )


def _reference(request: Request, candidate: ShardSet) -> ShardSet:
    if request.reference is None:
        raise UsageError(
            f"there are no logits in {request.logits}, and no reference to make them from"
            if request.logits
            else "there is no reference",
            code="no-reference",
            hint="name a second model: --reference FOLDER",
        )
    reference = read_set(find_set(request.reference))
    if _vocabulary(reference) != _vocabulary(candidate):
        raise UsageError(
            f"{_name(candidate)} and {_name(reference)} have other vocabularies, so their tokens cannot be compared",
            code="other-vocabulary",
            hint="compare quants of one model",
        )
    return reference


def _vocabulary(shards: ShardSet) -> tuple[object, ...]:
    keys = ("tokenizer.ggml.model", "tokenizer.ggml.pre", "tokenizer.ggml.bos_token_id")
    return (*(shards.metadata.get(key) for key in keys), _tokens(shards))


def _tokens(shards: ShardSet) -> int | None:
    tokens = shards.metadata.get("tokenizer.ggml.tokens")
    return tokens.length if isinstance(tokens, SkippedArray) else None


def _wanted(request: Request) -> kept_logits.Wanted:
    files = None
    if request.reference is not None:
        paths = find_set(request.reference)
        files = kept_logits.model_files(paths, read_set(paths))
    text = None if request.text is None else request.text.strip()
    return kept_logits.Wanted(files=files, text=text, context_tokens=request.context_tokens, chunks=request.chunks)


def _make_logits(run: _Runs, request: Request, reference: ShardSet, logits: Path) -> kept_logits.Source:
    """Have the reference read the text. The file gets its name when it is whole, so a killed run leaves none."""
    text = (request.text or "").strip()
    context, chunks = request.context_tokens or CONTEXT_TOKENS, request.chunks or CHUNKS
    least = int(2 * context * _BYTES_PER_TOKEN)
    if len(text.encode()) < least:
        raise UsageError(
            f"the text is too short: {len(text.encode()):,} bytes, and two chunks of {context} tokens "
            f"need {least:,} or more",
            code="text-too-short",
            hint="give a longer --text FILE, or a smaller --context",
        )
    tokens = _tokens(reference)
    if tokens is not None:
        most = Logits(context_tokens=context, vocabulary=tokens, chunks=chunks)
        disk.require(logits.parent, most.size_bytes)
    source, part = run.work / "text.txt", logits.with_name(logits.name + ".part")
    run.listen(Step(text=f"{_name(reference)} reads the text: up to {chunks} chunks"))
    try:
        source.write_text(text, encoding="utf-8")
        logits.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MachineError(f"cannot write to {logits.parent}", code="cannot-write", cause=error.strerror) from error
    paths = find_set(request.reference or request.candidate)
    model = ["--model", str(paths[0]), "--file", str(source)]
    size = ["--ctx-size", str(context), "--chunks", str(chunks)]
    try:
        output = run("reference", [*model, *size, "--kl-divergence-base", str(part)])
        header = _header(part)
        if header is None or part.stat().st_size != header.size_bytes:
            raise UsageError(
                "the reference did not read the text to its end",
                code="text-too-short",
                cause=_complaint(output),
                hint="give a longer --text FILE, or a smaller --context",
            )
        made = kept_logits.Source(
            reference=_name(reference),
            files=kept_logits.model_files(paths, reference),
            text_sha256=kept_logits.text_hash(text),
            context_tokens=context,
            chunks=chunks,
            logits_sha256=kept_logits.logits_hash(part),
        )
        kept_logits.write(logits, made)
        part.replace(logits)
    finally:
        part.unlink(missing_ok=True)
    return made


def _header(path: Path) -> Logits | None:
    try:
        with path.open("rb") as stream:
            return read_header(stream.read(HEADER_BYTES))
    except OSError:
        return None


def _checked(path: Path, candidate: ShardSet) -> Logits:
    """What the file holds, if it is whole and of the candidate's vocabulary: the tool itself goes on with neither."""
    header = _header(path)
    if header is None or path.stat().st_size != header.size_bytes:
        raise IntegrityError(
            f"{path} is no whole file of logits",
            code="bad-logits",
            hint=f"remove it and name the --reference again: rm {shlex.quote(str(path))}",
        )
    if header.scored_tokens < _LEAST_SCORED:
        raise UsageError(
            f"only {header.scored_tokens} tokens are scored, and {_TOOL} makes no statistics of fewer than "
            f"{_LEAST_SCORED}",
            code="text-too-short",
            hint="give a longer --text FILE, or more --chunks",
        )
    tokens = _tokens(candidate)
    if tokens is not None and tokens != header.vocabulary:
        raise UsageError(
            f"the logits in {path} are of a vocabulary of {header.vocabulary:,} tokens, and {_name(candidate)} has "
            f"{tokens:,}",
            code="other-vocabulary",
            hint="compare quants of one model",
        )
    return header


def _first(path: Path) -> Path:
    return find_set(path)[0]


def _name(shards: ShardSet) -> str:
    name = shards.metadata.get("general.name")
    return f"{shards.files[0].name}" + (f" ({name})" if isinstance(name, str) else "")


def _complaint(output: str) -> str | None:
    """The tool's first line of level E, else its last."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\d.]+ E ", line)]
    return bare((errors or lines[-1:])[0]) if lines else None
