"""What a serving request is planned from: an engine, whole files, and this machine as that engine sees it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kimigguf.download.named import CatalogueTarget, Target, complete, present
from kimigguf.download.store import StoredSet, models_dir, stored_at
from kimigguf.engines import prepare
from kimigguf.engines.choose import choose
from kimigguf.engines.discover import known_flags
from kimigguf.engines.engine import FoundEngine
from kimigguf.engines.passthrough import check_extra, check_known
from kimigguf.engines.request import Request
from kimigguf.engines.serving import chat_template_arguments, load_serving
from kimigguf.engines.sight import seen_by, undescribed, unseen
from kimigguf.errors import UsageError
from kimigguf.events import Listener, Notice, Step, ignore
from kimigguf.hardware.detect import PATIENT_LIMIT_SECONDS, detect
from kimigguf.hardware.snapshot import Machine
from kimigguf.memory.settings import Settings
from kimigguf.placement.placed import Shortfall
from kimigguf.placement.plan import Plan
from kimigguf.placement.plan_file import changes, load_plan, remake_commands


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A plan with what it was made from. ``stored`` is None before a dry run's files are fetched."""

    plan: Plan
    engine: FoundEngine
    stored: StoredSet | None
    machine: Machine


def planned(request: Request, environ: Mapping[str, str], listen: Listener) -> Made | Shortfall:
    """A plan for what the request names, fetched if it is not here and fits; a Shortfall does not fit.

    A dry run fetches headers alone.

    Raises:
        KimiggufError: Of every kind; see the rooms that are called.
    """
    target = prepare.target_of(request.target or "", environ)
    prepare.check_wish(target, request.context_tokens)
    _check_effort(target, request, environ)
    engine = choose(environ, kind=request.engine, engine_path=request.engine_path, need=target.need)
    _check_arguments(request, engine, environ)
    listen(Step(text=f"engine: {engine.title}"))
    models = models_dir(environ, request.models_dir)
    told = request.models_dir is not None or bool(environ.get("KIMIGGUF_MODELS"))
    may = not request.no_download
    settings = Settings(slots=request.slots)
    if may and isinstance(absent := present(target, models), CatalogueTarget):
        machine = _seen_machine(engine, environ, listen if request.dry_run else ignore)
        context = request.context_tokens
        early = prepare.hopeless(absent, models, machine, settings, context_tokens=context) or prepare.foreseen(
            absent, models, machine, settings, context_tokens=context, environ=environ, listen=listen
        )
        if isinstance(early, Shortfall):
            return early
        if request.dry_run:
            return Made(plan=early, engine=engine, stored=None, machine=machine)
    stored = prepare.obtain(target, models, environ=environ, may_download=may, told=told, listen=listen)
    stored = prepare.verified(stored, listen)
    # Read again: a download takes hours.
    seen = _seen_machine(engine, environ, listen)
    plan = prepare.plan_on(stored, seen, settings, context_tokens=request.context_tokens)
    if isinstance(plan, Shortfall):
        return plan
    return Made(plan=plan, engine=engine, stored=stored, machine=seen)


def _check_arguments(request: Request, engine: FoundEngine, environ: Mapping[str, str]) -> None:
    """Refuse arguments after ``--`` before anything is fetched for them."""
    check_extra(request.extra, engine.kind)
    if request.extra:
        check_known(request.extra, known_flags(engine, environ))


def _seen_machine(engine: FoundEngine, environ: Mapping[str, str], listen: Listener) -> Machine:
    """This machine as the engine sees it. What the two do not agree on is said: a plan leaves it out."""
    machine = detect(environ=environ, limit_seconds=PATIENT_LIMIT_SECONDS)
    for sentence in (unseen(machine, engine), undescribed(machine, engine)):
        if sentence is not None:
            listen(Notice(text=sentence))
    return seen_by(machine, engine)


def _check_effort(target: Target, request: Request, environ: Mapping[str, str]) -> None:
    if isinstance(target, CatalogueTarget):
        chat_template_arguments(load_serving(target.profile.architecture, environ), request.effort)


def replayed(request: Request, environ: Mapping[str, str], listen: Listener) -> Made:
    """The plan of a file, on files that are as it says. What changed on the machine is for the pre-flight to tell.

    Raises:
        UsageError: ``bad-plan``, ``plan-without-files``, ``plan-stale`` if the files are others.
    """
    plan = load_plan(request.plan_path or Path())
    engine = choose(environ, kind=request.engine, engine_path=request.engine_path)
    _check_arguments(request, engine, environ)
    listen(Step(text=f"engine: {engine.title}"))
    if plan.model.folder is None or not plan.model.files:
        raise UsageError(
            "the plan was made before its files were on this machine",
            code="plan-without-files",
            hint=f"{remake_commands(plan)} && kimigguf serve --plan plan.json",
        )
    stored = prepare.verified(complete(stored_at(Path(plan.model.folder) / plan.model.files[0].name)), listen)
    machine = _seen_machine(engine, environ, listen)
    before = changes(plan, machine)
    if different := [
        line for line in changes(plan, machine, files=prepare.planned_files(stored)) if line not in before
    ]:
        raise UsageError(
            "the files are not those that the plan was made for",
            code="plan-stale",
            cause="; ".join(different[:4]),
            hint=f"make it again: {remake_commands(plan)}",
        )
    return Made(plan=plan, engine=engine, stored=stored, machine=machine)
