"""`omnistage serve`: models behind an OpenAI-compatible HTTP service."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from omnistage.cli.common import ConfigOption, DeviceOption, DTypeOption, SetOption, err
from omnistage.errors import InvalidRequestError, MissingDependencyError

if TYPE_CHECKING:
    from omnistage.server.service import Service


def serve(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help="A model's folder or name.")] = None,
    models: Annotated[
        list[str] | None, typer.Option("--model", metavar="NAME=PATH", help="A further model. Repeatable.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="What clients call MODEL; default: the folder's name.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for every network.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.", min=0, max=65535)] = 8000,
    api_key: Annotated[list[str] | None, typer.Option(help="A key that clients must send. Repeatable.")] = None,
    api_keys: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A YAML file of keys, with rates and models.")
    ] = None,
    max_body_mib: Annotated[int, typer.Option(help="Largest request body in MiB.", min=1, max=4096)] = 64,
    drain_seconds: Annotated[
        float, typer.Option(help="Time for running requests when the service stops.", min=0.0)
    ] = 30.0,
    stall_seconds: Annotated[
        float, typer.Option(help="Cut off clients that neither read nor send for so long.", min=0.1)
    ] = 60.0,
    cors: Annotated[
        list[str] | None, typer.Option(metavar="ORIGIN", help="A web origin whose pages may call. Repeatable.")
    ] = None,
    audit_log: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Append who asked what and how it ended, as JSON lines.")
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Keep video jobs and pictures' files here; default: only while it runs."),
    ] = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    device: DeviceOption = None,
    dtype: DTypeOption = None,
) -> None:
    """Serve models over HTTP, as OpenAI's API does.

    Local paths in requests are refused and URLs are not fetched, whatever the model's configuration says; keys may
    also come in the environment variable OMNISTAGE_API_KEYS, joined by commas.

    Examples:

    ```
    omnistage serve out/tiny
    omnistage serve --model chat=out/tiny --model draw=out/flux --port 9000 --api-key secret-key
    ```
    """
    places = _places(model, name, models or [])
    try:
        from omnistage.server.runner import run
    except ModuleNotFoundError as error:
        raise MissingDependencyError("the service needs more: pip install 'omnistage[server]'") from error
    from omnistage.server.audit import log_to
    from omnistage.server.keys import load_keys
    from omnistage.server.service import Service

    if audit_log is not None:
        log_to(audit_log)
    keyring = load_keys(api_key or (), api_keys)
    service = Service(keyring=keyring, state=state)

    def load(target: Service) -> None:
        from omnistage.omni import AsyncOmni

        given = (*(overrides or ()), "limits.media.allow_paths=false")
        for served, place in places.items():
            err().print(f"loading {served} from {place}", style="dim", soft_wrap=True, markup=False)
            target.add(served, AsyncOmni(place, config=config, overrides=given, device=device, dtype=dtype))

    run(
        service,
        load,
        host=host,
        port=port,
        drain_seconds=drain_seconds,
        max_body_bytes=max_body_mib * 2**20,
        stall_seconds=stall_seconds,
        cors=cors or (),
    )


def _places(model: str | None, name: str | None, more: list[str]) -> dict[str, str]:
    places: dict[str, str] = {}
    if model is not None:
        places[name or Path(model).name or model] = model
    for entry in more:
        served, found, place = entry.partition("=")
        if not found or not served or not place:
            raise InvalidRequestError(f"{entry!r} is not NAME=PATH, like chat=out/tiny", param="--model")
        if served in places:
            raise InvalidRequestError(f"{served!r} is named twice; give each model its own name", param="--model")
        places[served] = place
    if not places:
        raise InvalidRequestError("is missing; name a model's folder, or use --model NAME=PATH", param="MODEL")
    return places
