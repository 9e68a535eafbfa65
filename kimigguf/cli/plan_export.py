"""``kimigguf plan --format``: the plan as a file for systemd, Docker, a shell or llama-server's own readers."""

import os
import shlex
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from kimigguf.cli.app import App
from kimigguf.errors import ExitCode, MachineError, UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from kimigguf.cli.plan import Answer, Refusal
    from kimigguf.cli.plan_command import Wish
    from kimigguf.cli.plan_target import Target
    from kimigguf.engines.export import Export, Service
    from kimigguf.placement.plan import Plan

FORMATS: Final = ("systemd", "preset", "docker", "env", "shell")


def check_format(app: App, form: str, *, drawn: Mapping[str, bool]) -> None:
    """Refuse what makes no sense beside a file: ``drawn`` are the options of an answer to be read.

    Raises:
        UsageError: ``format-and-answer``.
    """
    from kimigguf.cli.show import Mode

    given = [name for name, on in {**drawn, "--json": app.show.mode is Mode.JSON}.items() if on]
    if given:
        raise UsageError(
            f"--format {form} prints a file and nothing else; {given[0]} asks for an answer",
            code="format-and-answer",
            hint="leave one of them out",
        )


def refuse(app: App, refusal: "Refusal") -> int:
    """Say on stderr that there is no plan: stdout is the file's, and there is none."""
    from kimigguf.cli import plan_show

    plan_show.draw_refusal(app.show.err, refusal)
    return ExitCode.ANSWERED_NO


def to_be_there(app: App, target: "Target", models_dir: Path | None) -> "Target":
    """The model with the folder that ``download --models-dir`` will give it, where its files are known and not here.

    So a plan for another machine can be written as its file before anything is downloaded.
    """
    from kimigguf.download.store import folder_of

    model = target.model
    if models_dir is None or model.folder is not None or not model.files:
        return target
    if not (model.repository and model.quant and model.commit):
        return target
    folder = folder_of(models_dir.absolute(), repository=model.repository, quant=model.quant, commit=model.commit)
    fetch = shlex.join(["kimigguf", "download", model.quant, "--models-dir", str(models_dir.absolute())])
    app.show.note(f"note: the files are not here: to have them in {folder}, where this file has them: {fetch}")
    return replace(target, model=replace(model, folder=str(folder)))


def write(app: App, answer: "Answer", wish: "Wish", form: str, remake: str) -> None:
    """Print the file on stdout, exactly, and what must be known besides on stderr.

    Raises:
        UsageError: ``plan-without-files``, ``not-expressible``, ``no-image``.
        MachineError: ``engine-lacks-devices``.
    """
    service = _service(app, answer, wish, form, remake)
    made = _writer(form)(service)
    plan = answer.plan
    left_out = f"left out, because this engine does not know it: {', '.join(service.command.left_out)}"
    told = (
        *answer.warnings,
        *(f"gave way: {words}" for words in plan.gave_way),
        *plan.notices,
        *((left_out,) if service.command.left_out else ()),
        *made.notices,
    )

    def human(console: "Console") -> None:
        console.file.write(made.text)

    app.show.answer({"schema": "kimigguf.export/1", "format": form, "text": made.text}, human)
    for notice in told:
        app.show.note(f"note: {notice}")


def _writer(form: str) -> "Callable[[Service], Export]":
    from kimigguf.engines.export_docker import docker_script
    from kimigguf.engines.export_files import environment, preset, shell_script
    from kimigguf.engines.export_systemd import systemd_unit

    return dict(zip(FORMATS, (systemd_unit, preset, docker_script, environment, shell_script), strict=True))[form]


def _require_real_files(plan: "Plan") -> None:
    """Refuse links: a container is given their folder and not what they lead to."""
    folder = plan.model.folder or ""
    if links := [file.name for file in plan.model.files if os.path.islink(f"{folder}/{file.name}")]:  # noqa: PTH114 -- never raises
        raise UsageError(
            f"{links[0]} is a link, and a container sees only the folder that it lies in",
            code="not-expressible",
            hint=f"take the files over first: {shlex.join(['kimigguf', 'import', folder])}",
        )


def _service(app: App, answer: "Answer", wish: "Wish", form: str, remake: str) -> "Service":
    from kimigguf.cli.plan_command import bring
    from kimigguf.engines.command import VARIABLES, device_names
    from kimigguf.engines.export import CARRIED, Service
    from kimigguf.engines.serving import load_serving

    plan = answer.plan
    if plan.model.folder is None:
        quant = plan.model.quant or "QUANT"
        raise UsageError(
            f"the files of {quant} are not on this machine, and a file that starts them must say where they are",
            code="plan-without-files",
            cause="--hub --models-dir FOLDER says where they will be, on this machine or another",
            hint=f"{bring(quant)} && {remake}",
        )
    if answer.command is None:
        raise MachineError(
            "this engine cannot be told this plan",
            code="engine-lacks-devices",
            cause="; ".join(answer.warnings) or None,
            hint="name an engine built for these accelerators with --engine-path, or leave it out",
        )
    if form == "docker":
        _require_real_files(plan)
    profile = load_serving(plan.model.architecture, app.environ)
    user, group, name = _user()
    return Service(
        plan=plan,
        command=answer.command,
        devices=device_names(plan, answer.engine),
        variables={**{s.flag: s.variable for s in profile.settings if s.variable is not None}, **VARIABLES},
        environ={name: app.environ[name] for name in CARRIED if app.environ.get(name)} if answer.is_here else {},
        host=wish.host,
        port=wish.port,
        remake=remake,
        api_key_file=wish.api_key_path,
        user=user,
        group=group,
        user_name=name,
    )


def _user() -> tuple[int | None, int | None, str | None]:
    """Who plans, and can therefore read the files; root is nobody to serve as."""
    try:
        import pwd

        entry = pwd.getpwuid(os.getuid())
    except (ImportError, KeyError):
        return None, None, None
    return (entry.pw_uid, entry.pw_gid, entry.pw_name) if entry.pw_uid else (None, None, None)


def format_option(function: "Callable[..., int]") -> "Callable[..., int]":
    """Add ``--format``, as the parameter ``form``."""
    return click.option(
        "--format",
        "form",
        type=click.Choice(FORMATS),
        help="Print a file that starts it instead: a systemd unit, a preset for llama-server's router, a script"
        " that starts a Docker container, an environment, or a shell script.",
    )(function)
