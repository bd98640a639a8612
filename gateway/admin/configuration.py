"""The configuration: read again at an operator's word, and the models that the database has.

A change of a model is a row of the audit log, with its settings before and after; the latest row of an
alias is what the database says of it. It is checked with the file, as the file's own models are, before
it is written. The docstrings of operations are descriptions in the OpenAPI document. Invariant: the file
wins where both name an alias; what could not be used is not kept.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec.structs import asdict

from gateway import accounts
from gateway.accounts.audit import CONFIG_RELOADED, MODEL_CHANGED, ModelChange
from gateway.admin import models
from gateway.admin.guard import Acting
from gateway.admin.parts import AdminParts, WorkerParts
from gateway.wire.errors import Unavailable

_HISTORY = 50


async def reload(parts: WorkerParts, operator: Acting) -> models.ChangesOut:
    """Reads the configuration again, on every host. A wrong one changes nothing. It is written to the audit log."""
    await parts.audit.add(parts.audit_row(CONFIG_RELOADED, "", operator))
    return models.ChangesOut(changes=await _changed(parts, "the admin API"))


async def list_models(parts: WorkerParts) -> models.ConfiguredOut:
    """The aliases, and who says what they are: the file, the database, or both, and then the file counts."""
    changes = await parts.audit.model_changes()
    kept = await parts.audit.kept_models()
    in_file = parts.settings.models.keys() - parts.configuration.kept
    return models.ConfiguredOut(
        models=[
            models.ConfiguredModel(alias=alias, is_in_file=alias in in_file, kept=kept.get(alias))
            for alias in sorted({*parts.settings.models, *kept})
        ],
        history=[asdict(row) | asdict(change) for row, change in reversed(changes[-_HISTORY:])],
    )


async def set_model(parts: WorkerParts, body: models.ModelIn, operator: Acting) -> models.ChangesOut:
    """Keeps an alias's model in the database, or removes it, on every host. A dry run only tells what would change."""
    return await _keep(parts, body.alias, body.model, operator, is_dry_run=body.is_dry_run)


async def revert(parts: WorkerParts, body: models.RevertIn, operator: Acting) -> models.ChangesOut:
    """Gives an alias the model that it had before a change. It is a change itself."""
    for row, change in await parts.audit.model_changes():
        if row.id == body.id:
            return await _keep(parts, change.alias, change.before, operator, is_dry_run=body.is_dry_run)
    raise accounts.DoesNotExist(f"there is no change {body.id} of a model")


async def _keep(
    parts: AdminParts, alias: str, model: dict[str, Any] | None, operator: Acting, *, is_dry_run: bool
) -> models.ChangesOut:
    before = await parts.audit.kept_models()
    kept = {**before, alias: model} if model is not None else {one: of for one, of in before.items() if one != alias}
    why = f"a change of the model {alias}"
    changes = await _changed(parts, why, kept, is_dry_run=True)
    if not is_dry_run and kept != before:
        change = ModelChange(alias, before.get(alias), model)
        await parts.audit.add(parts.audit_row(MODEL_CHANGED, msgspec.json.encode(change).decode(), operator))
        try:
            changes = await _changed(parts, why, kept)
        except BaseException:
            undone = ModelChange(alias, model, before.get(alias))
            await parts.audit.add(parts.audit_row(MODEL_CHANGED, msgspec.json.encode(undone).decode(), operator))
            raise
    return models.ChangesOut(
        changes=changes, is_in_file=alias in parts.settings.models.keys() - parts.configuration.kept
    )


async def _changed(
    parts: AdminParts, why: str, kept: Mapping[str, Any] | None = None, *, is_dry_run: bool = False
) -> dict[str, str]:
    """Change the configuration: read it again, or use the models `kept`. Raises Invalid, Unavailable."""
    try:
        answer = await parts.configuration.reload(why, kept=kept, is_file_read=kept is None, is_dry_run=is_dry_run)
    except OSError as error:
        why = f"The supervisor does not answer ({error or type(error).__name__})"
        raise Unavailable(f"{why}: nothing has changed") from None
    if "error" in answer:
        raise accounts.Invalid("configuration", answer["error"])
    return dict(answer["changes"])
