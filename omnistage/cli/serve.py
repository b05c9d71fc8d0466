"""`omnistage serve`: models behind an OpenAI-compatible HTTP service."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from omnistage.cli.common import ConfigOption, DeviceOption, DTypeOption, SetOption, err
from omnistage.core.errors import InvalidRequestError, MissingDependencyError

if TYPE_CHECKING:
    from omnistage.server.access.jwt import TokenVerifier
    from omnistage.server.observe.tracing import Tracing
    from omnistage.server.service import Service

_ACCESS, _MEDIA, _INSIGHT = "Who may come in", "Media from elsewhere", "What is seen of it"


def serve(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help="A model's folder or name.")] = None,
    models: Annotated[
        list[str] | None, typer.Option("--model", metavar="NAME=PATH", help="A further model. Repeatable.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="What clients call MODEL; default: the folder's name.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for every network.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.", min=0, max=65535)] = 8000,
    max_body_mib: Annotated[int, typer.Option(help="Largest request body in MiB.", min=1, max=4096)] = 64,
    drain_seconds: Annotated[
        float, typer.Option(help="Time for running requests when the service stops.", min=0.0)
    ] = 30.0,
    stall_seconds: Annotated[
        float, typer.Option(help="Cut off clients that neither read nor send for so long.", min=0.1)
    ] = 60.0,
    state: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Keep video jobs and pictures' files here; default: only while it runs."),
    ] = None,
    api_key: Annotated[
        list[str] | None, typer.Option(help="A key that clients must send. Repeatable.", rich_help_panel=_ACCESS)
    ] = None,
    api_keys: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A YAML file of keys, with rates and models.", rich_help_panel=_ACCESS),
    ] = None,
    jwt_key: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Take JSON web tokens, checked with this public key (PEM or JWKS).",
            rich_help_panel=_ACCESS,
        ),
    ] = None,
    jwt_secret_env: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Or with the HS256 secret in this variable.", rich_help_panel=_ACCESS),
    ] = None,
    jwt_audience: Annotated[
        str | None, typer.Option(help="The audience that tokens must be for.", rich_help_panel=_ACCESS)
    ] = None,
    jwt_issuer: Annotated[
        str | None, typer.Option(help="The issuer that tokens must come from.", rich_help_panel=_ACCESS)
    ] = None,
    jwt_requests_per_minute: Annotated[
        float | None,
        typer.Option(help="Most requests a minute of one token holder.", min=0.01, rich_help_panel=_ACCESS),
    ] = None,
    jwt_max_concurrent: Annotated[
        int | None, typer.Option(help="Most requests of one token holder at once.", min=1, rich_help_panel=_ACCESS)
    ] = None,
    cors: Annotated[
        list[str] | None,
        typer.Option(metavar="ORIGIN", help="A web origin whose pages may call. Repeatable.", rich_help_panel=_ACCESS),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="A further name to answer to, where only this machine's own are. Repeatable.",
            rich_help_panel=_ACCESS,
        ),
    ] = None,
    content_filter: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[:ARG]", help="What may be said, like wordlist:FILE; default: all.", rich_help_panel=_ACCESS
        ),
    ] = None,
    media_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST",
            help="Fetch media from https URLs of this host, or *.example.org. Repeatable.",
            rich_help_panel=_MEDIA,
        ),
    ] = None,
    media_http: Annotated[
        bool, typer.Option("--media-http", help="From http URLs of these hosts too.", rich_help_panel=_MEDIA)
    ] = False,
    media_path: Annotated[
        list[Path] | None,
        typer.Option(metavar="DIR", help="Read media files below this folder. Repeatable.", rich_help_panel=_MEDIA),
    ] = None,
    audit_log: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Append who asked what and how it ended, as JSON lines.", rich_help_panel=_INSIGHT
        ),
    ] = None,
    otel_endpoint: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Send OpenTelemetry spans to this collector.", rich_help_panel=_INSIGHT),
    ] = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    device: DeviceOption = None,
    dtype: DTypeOption = None,
) -> None:
    """Serve models over HTTP, as OpenAI's API does.

    Local paths in requests are refused and URLs are not fetched unless the options below allow it, whatever the
    model's configuration says; keys may also come in the environment variable OMNISTAGE_API_KEYS, joined by commas.
    `--set KEY=VALUE` is for every model, `--set NAME:KEY=VALUE` for one.

    Examples:

    ```
    omnistage serve out/tiny
    omnistage serve --model chat=out/tiny --model draw=out/flux --port 9000 --api-key secret-key
    omnistage serve --model chat=out/tiny --model draw=out/flux --set chat:talker.max_tokens=400
    ```
    """
    places = _places(model, name, models or [])
    try:
        from omnistage.server.http.run import run
    except ModuleNotFoundError as error:
        raise MissingDependencyError("the service needs more: pip install 'omnistage[server]'") from error
    from omnistage.server.access.keys import load_keys
    from omnistage.server.moderation.filters import make_filter
    from omnistage.server.observe.audit import log_to
    from omnistage.server.service import Service

    settings = _settings(overrides or [], list(places))
    media = _media(media_host or [], media_http, media_path or [])
    tokens = _tokens(jwt_key, jwt_secret_env, jwt_audience, jwt_issuer, jwt_requests_per_minute, jwt_max_concurrent)
    keyring = load_keys(api_key or (), api_keys, tokens)
    chosen = None if content_filter is None else make_filter(content_filter)
    if audit_log is not None:
        log_to(audit_log)
    tracing = _tracing(otel_endpoint)
    service = Service(keyring=keyring, state=state, content_filter=chosen, tracing=tracing)

    def load(target: Service) -> None:
        from omnistage.omni import AsyncOmni

        for served, place in places.items():
            err().print(f"loading {served} from {place}", style="dim", soft_wrap=True, markup=False)
            given = (*settings[served], *media)
            target.add(served, AsyncOmni(place, config=config, overrides=given, device=device, dtype=dtype))

    try:
        run(
            service,
            load,
            host=host,
            port=port,
            drain_seconds=drain_seconds,
            max_body_bytes=max_body_mib * 2**20,
            stall_seconds=stall_seconds,
            cors=cors or (),
            local_names=_local_names(host, keyring.required, allow_host or []),
        )
    finally:
        if tracing is not None:
            tracing.close()


def _settings(overrides: list[str], names: list[str]) -> dict[str, list[str]]:
    """The settings of each model: those for all, and those that begin with its name, as in `chat:key=value`."""
    settings: dict[str, list[str]] = {name: [] for name in names}
    for entry in overrides:
        name, colon, rest = entry.partition(":")
        if not colon or "=" in name:
            for own in settings.values():
                own.append(entry)
        elif name in settings:
            settings[name].append(rest)
        else:
            raise InvalidRequestError(f"there is no model {name!r}; models: {', '.join(names)}", param="--set")
    return settings


def _local_names(host: str, guarded: bool, more: list[str]) -> list[str] | None:
    """The names to answer to beside this machine's own; None: any, for keys guard it or others may call it."""
    from omnistage.server.access.hosts import is_loopback

    if is_loopback(host) and not guarded:
        return more
    if more:
        raise InvalidRequestError(
            "is for a service without keys on an address like 127.0.0.1; any other answers to every name",
            param="--allow-host",
        )
    return None


def _media(hosts: list[str], http: bool, folders: list[Path]) -> list[str]:
    """Where media may come from, as settings that stand above everything else."""
    from omnistage.media.hosts import HostRule

    for host in hosts:
        try:
            HostRule.parse(host)
        except ValueError as error:
            raise InvalidRequestError(str(error), param="--media-host") from error
    if http and not hosts:
        raise InvalidRequestError("goes with --media-host; name the hosts", param="--media-http")
    for folder in folders:
        if not folder.is_dir():
            raise InvalidRequestError(f"{folder} is not a folder", param="--media-path")
    values: dict[str, object] = {
        "allow_urls": bool(hosts),
        "url_hosts": hosts,
        "allow_http_urls": http,
        "allow_private_urls": False,
        "allow_paths": bool(folders),
        "allowed_path_roots": [str(folder.resolve()) for folder in folders],
    }
    return [f"limits.media.{key}={json.dumps(value)}" for key, value in values.items()]


def _tokens(
    key: Path | None,
    secret: str | None,
    audience: str | None,
    issuer: str | None,
    rate: float | None,
    max_concurrent: int | None,
) -> TokenVerifier | None:
    if key is None and secret is None:
        for name, value in (("audience", audience), ("issuer", issuer)):
            if value is not None:
                raise InvalidRequestError("goes with --jwt-key or --jwt-secret-env", param=f"--jwt-{name}")
        return None
    if key is not None and secret is not None:
        raise InvalidRequestError("give --jwt-key or --jwt-secret-env, not both", param="--jwt-key")
    from omnistage.server.access.jwt import TokenVerifier, read_keys, secret_key

    keys = read_keys(key) if key is not None else [secret_key(secret or "")]
    return TokenVerifier(keys, audience=audience, issuer=issuer, rate=rate, max_concurrent=max_concurrent)


def _tracing(endpoint: str | None) -> Tracing | None:
    """Spans where the option or OpenTelemetry's own variables ask for them; without either nothing is imported."""
    if endpoint is None and not otel_in_environment():
        return None
    try:
        from omnistage.server.observe.tracing import start_tracing
    except MissingDependencyError as error:
        if endpoint is not None:
            raise
        # The variables may be meant for other programs.
        err().print(f"no traces are sent: {error.message}", style="yellow", markup=False)
        return None
    return start_tracing(endpoint)


def otel_in_environment() -> bool:
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or os.environ.get("OTEL_TRACES_EXPORTER") == "none":
        return False
    return any(os.environ.get(f"OTEL_EXPORTER_OTLP_{name}ENDPOINT") for name in ("", "TRACES_"))


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
