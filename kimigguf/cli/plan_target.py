"""Which model a command means by ``QUANT|PATH``: its memory facts from files, the hub's headers or the catalogue."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kimigguf.cli.app import App
from kimigguf.errors import UsageError
from kimigguf.events import Listener, ignore

if TYPE_CHECKING:
    from kimigguf.catalogue.quants import ModelProfile, Quant
    from kimigguf.download.store import StoredSet
    from kimigguf.gguf_file.shards import ShardSet
    from kimigguf.memory.model import ModelSpec
    from kimigguf.placement.plan import PlannedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A model to plan for. ``shards`` is None where only the catalogue's facts are at hand.

    ``source`` says in words where the facts come from.
    """

    spec: "ModelSpec"
    model: "PlannedModel"
    quant: "Quant | None"
    shards: "ShardSet | None"
    source: str


def resolve(
    app: App, text: str, *, models_dir: Path | None = None, ask_hub: bool = False, listen: Listener = ignore
) -> Target:
    """The model behind ``text``: a path, or a quant's name; of a quant the files on this machine come first.

    Args:
        app: For its environment.
        text: A shard, a folder, a single file, or the name of a quant.
        models_dir: Where to look for downloaded sets, in place of the configured folder.
        ask_hub: Read the headers of a quant that is not here from the hub instead of trusting the catalogue.
        listen: Told what is being read.

    Raises:
        UsageError: ``unknown-quant``, or a path that is no model.
        IntegrityError: A set that is damaged or mixed, or a path to one that is incomplete.
        NetworkError: The hub did not answer.
    """
    from kimigguf.download.named import CatalogueTarget, present, target_of
    from kimigguf.download.store import models_dir as configured_models_dir

    target = target_of(text, app.environ)
    match present(target, configured_models_dir(app.environ, models_dir)):
        case CatalogueTarget(profile=profile, quant=quant) if ask_hub:
            return _from_hub(app, profile, quant, listen)
        case CatalogueTarget(profile=profile, quant=quant):
            return _from_catalogue(profile, quant)
        case stored:
            return _from_stored(stored, app.environ)


def _from_stored(stored: "StoredSet", environ: Mapping[str, str]) -> Target:
    from kimigguf.catalogue.profiles import load_model
    from kimigguf.engines.prepare import model_of
    from kimigguf.gguf_file.shards import read_set
    from kimigguf.memory.model import ModelSpec

    shards = read_set(tuple(file.path for file in stored.files))
    quants = load_model(environ=environ).quants if stored.quant is not None else ()
    return Target(
        spec=ModelSpec.from_shards(shards),
        model=model_of(stored, shards),
        quant=next((quant for quant in quants if quant.name == stored.quant), None),
        shards=shards,
        source=f"the headers of {len(stored.files)} file(s) in {stored.folder.absolute()}",
    )


def _from_hub(app: App, profile: "ModelProfile", quant: "Quant", listen: Listener) -> Target:
    from kimigguf.catalogue.hub import list_set, remote_headers
    from kimigguf.memory.model import ModelSpec
    from kimigguf.placement.plan import planned_model

    if profile.repository.id is None or profile.repository.commit is None:
        raise UsageError(f"no repository of {profile.title} is known to ask", code="no-repository")
    # A commit never changes: headers that were read once are good without the hub.
    commit = profile.repository.commit
    remote = list_set(profile.repository.id, quant, revision=commit, environ=app.environ, or_known=True)
    shards = remote_headers(remote, environ=app.environ, listen=listen)
    return Target(
        spec=ModelSpec.from_shards(shards),
        model=planned_model(
            shards,
            folder=None,
            quant=quant.name,
            repository=remote.repository,
            commit=remote.commit,
            sha256={file.name: file.sha256 for file in remote.files},
        ),
        quant=quant,
        shards=shards,
        source=f"the headers of {len(remote.files)} files on the hub at {remote.commit[:12]}",
    )


def _from_catalogue(profile: "ModelProfile", quant: "Quant") -> Target:
    from kimigguf.memory.model import ModelSpec
    from kimigguf.placement.plan import PlannedModel

    return Target(
        spec=ModelSpec.from_profile(profile, quant),
        model=PlannedModel(
            architecture=profile.architecture,
            quant=quant.name,
            repository=profile.repository.id,
            commit=profile.repository.commit,
            folder=None,
            files=(),
        ),
        quant=quant,
        shards=None,
        source="the catalogue's facts (nothing is downloaded; --hub asks for the real headers)",
    )
