"""The settings that an engine is given for a model, as data with reasons. Read from ``profiles/serving``."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from kimigguf import profile_files
from kimigguf.errors import UsageError

Value: TypeAlias = bool | int | float | str
DEFAULT: Final = "kimi-k3"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting: llama-server's ``flag``, xllamacpp's ``attribute``, and why it has its value.

    ``variable`` of the environment says the same as the flag; None where llama-server has none.

    Exactly one of ``value`` and ``from_plan`` is given. ``agent`` replaces ``value`` for agents. ``optional`` settings
    are left out where the engine does not know the flag.
    """

    name: str
    flag: str
    attribute: str
    scope: Literal["engine", "model"]
    reason: str
    source: str
    value: Value | None = None
    from_plan: str | None = None
    agent: Value | None = None
    optional: bool = False
    variable: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingProfile:
    """How a model is served. ``alias`` is the name that clients use; ``effort`` the default thinking effort."""

    name: str
    title: str
    architecture: str
    alias: str
    effort: str
    efforts: tuple[str, ...]
    effort_arguments: tuple[str, ...]
    settings: tuple[Setting, ...]


def load_serving(architecture: str, environ: Mapping[str, str] = os.environ) -> ServingProfile:
    """The profile of an architecture; for one that has none, the settings that hold for any model.

    Raises:
        UsageError: ``bad-profile``.
    """
    known = architecture in profile_files.names("serving", environ)
    profile = profile_files.read("serving", architecture if known else DEFAULT, ServingProfile, environ)
    for setting in profile.settings:
        if (setting.value is None) == (setting.from_plan is None):
            raise UsageError(
                f"the serving profile {profile.name!r}: {setting.name} needs either value or from_plan",
                code="bad-profile",
            )
    if profile.architecture == architecture:
        return profile
    return ServingProfile(
        name=architecture,
        title=architecture,
        architecture=architecture,
        alias=architecture,
        effort="",
        efforts=(),
        effort_arguments=(),
        settings=tuple(setting for setting in profile.settings if setting.scope == "engine"),
    )


def chat_template_arguments(profile: ServingProfile, effort: str | None) -> dict[str, str]:
    """The arguments for the chat template: the thinking effort, in every spelling that a template may read.

    Raises:
        UsageError: ``unknown-effort``.
    """
    if not profile.efforts:
        if effort is None:
            return {}
        raise UsageError(f"{profile.title} has no thinking effort to choose", code="unknown-effort")
    if effort is not None and effort not in profile.efforts:
        raise UsageError(
            f"{profile.title} knows no effort {effort!r}",
            code="unknown-effort",
            hint="one of: " + ", ".join(profile.efforts),
        )
    return dict.fromkeys(profile.effort_arguments, effort or profile.effort)
