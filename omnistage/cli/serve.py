"""`omnistage serve`: models behind an OpenAI-compatible HTTP service."""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer
from rich.text import Text

from omnistage.cli.common import EXIT_INTERRUPTED, leave_bar, print_interrupted, print_note, spinner
from omnistage.cli.early_imports import EarlyImports
from omnistage.cli.options import ModelOptions, adapter_folders, option
from omnistage.cli.serve_options import AccessOptions, MediaOptions, ObservabilityOptions
from omnistage.core.errors import ConfigError, InvalidRequestError, MissingDependencyError

if TYPE_CHECKING:
    from omnistage.server.service import Service

_SWITCH_SECONDS = 0.0001
"""After which a thread that needs the interpreter gets it from another. While a long request is prepared, Python's 5 ms
are waited for several times a token."""


@dataclass(frozen=True, slots=True)
class ServiceOptions:
    """Which models are served, and where."""

    models: list[str] = option([], "A further model. Repeatable.", "--model", metavar="NAME=PATH")
    name: str | None = option(None, "What clients call MODEL; default: the folder's name.")
    host: str = option("127.0.0.1", "Address to listen on; 0.0.0.0 for every network.")
    port: int = option(8000, "Port; 0 takes a free one.", min=0, max=65535)
    ssl_certfile: Path | None = option(None, "Serve https: the certificate and its chain, PEM.", metavar="FILE")
    ssl_keyfile: Path | None = option(
        None, "The certificate's private key; default: it is in the same file.", metavar="FILE"
    )
    public_url: str | None = option(
        None, "URL under which clients reach the service, for links in responses.", metavar="URL"
    )
    max_body_mib: int = option(64, "Largest request body in MiB.", min=1, max=4096)
    max_held_mib: int = option(
        1024, "Bytes that all requests and realtime sessions hold together, in MiB.", min=1, max=2**20
    )
    max_connections: int | None = option(
        None, "Open connections; beyond it idle ones are closed. Default: what the limit of open files allows.", min=1
    )
    max_text_mib: int = option(8, "Largest JSON body in MiB, without its media.", min=1, max=4096)
    max_json_values: int = option(262_144, "Maximum number of values in a JSON body.", min=1024, max=2**30)
    speech_quality: str | None = option(
        None, "How carefully speech is computed: full, balanced or fast; short for the speech stage's quality."
    )
    drain_seconds: float = option(
        30.0, "Time for running requests when the service stops; 5 s later the process ends.", min=0.0, max=86_400.0
    )
    stall_seconds: float = option(60.0, "Disconnect clients that neither read nor send for this long.", min=0.1)
    state: Path | None = option(
        None, "Keep video jobs and image files in this folder; default: only while it runs.", metavar="DIR"
    )

    def checked_public_url(self) -> str | None:
        """Without the last slash."""
        if self.public_url is None:
            return None
        parts = urlsplit(self.public_url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise InvalidRequestError("is not a URL like https://api.example.org", param="--public-url")
        return self.public_url.rstrip("/")

    def certificate(self) -> tuple[Path, Path] | None:
        """Of https, with its key, which fits. Raises `InvalidRequestError`."""
        import ssl

        if self.ssl_certfile is None:
            if self.ssl_keyfile is not None:
                raise InvalidRequestError("requires --ssl-certfile", param="--ssl-keyfile")
            return None
        key = self.ssl_keyfile or self.ssl_certfile
        for param, file in (("--ssl-certfile", self.ssl_certfile), ("--ssl-keyfile", key)):
            if not file.is_file():
                raise InvalidRequestError(f"{file} is not a file", param=param)
        try:  # a key with a passphrase is refused, where OpenSSL would ask for it on the terminal
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.ssl_certfile, key, password=lambda: "")
        except (OSError, ValueError) as error:
            raise InvalidRequestError(
                f"no certificate with its key, in PEM and without a passphrase: {error}", param="--ssl-certfile"
            ) from error
        return self.ssl_certfile, key

    def folders(self, model: str | None) -> dict[str, str]:
        """The folder, or the hub's name, of each model by the name that clients use."""
        folders = {} if model is None else {self.name or Path(model).name or model: model}
        for entry in self.models:
            name, equals, folder = entry.partition("=")
            if not equals or not name or not folder:
                raise InvalidRequestError(f"{entry!r} is not NAME=PATH, like chat=out/tiny", param="--model")
            if name in folders:
                raise InvalidRequestError(f"{name!r} is named twice; give each model its own name", param="--model")
            folders[name] = folder
        if not folders:
            raise InvalidRequestError("is missing; name a model's folder, or use --model NAME=PATH", param="MODEL")
        return folders


def serve(
    options: ServiceOptions,
    access: AccessOptions,
    media: MediaOptions,
    observability: ObservabilityOptions,
    settings: ModelOptions,
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help="A model's folder or name.")] = None,
) -> None:
    """Serve models over HTTP with OpenAI's API.

    Local paths in requests are refused and URLs are not fetched unless the options below allow it, whatever the
    model's configuration says. Keys may also be given in the environment variable OMNISTAGE_API_KEYS, separated by
    commas. `--set KEY=VALUE` is for every model, `--set NAME:KEY=VALUE` for one.

    Examples:

    ```
    omnistage serve out/tiny
    omnistage serve --model chat=out/tiny --model draw=out/flux --port 9000 --api-key secret-key
    omnistage serve --model chat=out/tiny --model draw=out/flux --set chat:talker.max_tokens=400
    ```
    """
    folders = options.folders(model)
    try:
        with EarlyImports(folders.values()) as imports:
            _serve(options, access, media, observability, settings, folders, imports)
    except KeyboardInterrupt:
        print_interrupted("stopped before the service listened; no model was loaded")
        raise typer.Exit(EXIT_INTERRUPTED) from None


def _serve(
    options: ServiceOptions,
    access: AccessOptions,
    media: MediaOptions,
    observability: ObservabilityOptions,
    settings: ModelOptions,
    folders: dict[str, str],
    imports: EarlyImports,
) -> None:
    """Set the service up, and run it until a signal."""
    try:
        with spinner("starting"):
            from omnistage.server.http.app import create_app
            from omnistage.server.http.json_body import JsonLimits
            from omnistage.server.http.listening import connections_below, raise_descriptor_limit
            from omnistage.server.http.run import run
            from omnistage.server.http.stopping import end_process
    except ModuleNotFoundError as error:
        raise MissingDependencyError("the service needs more packages: pip install 'omnistage[server]'") from error
    from omnistage.media.budget import media_budget
    from omnistage.media.decode_pool import decode_processes
    from omnistage.server.moderation.filters import make_filter
    from omnistage.server.service import Service

    overrides = overrides_by_model(settings.overrides, list(folders))
    above = [*media.overrides(), *access.adapter_overrides()]
    overrides = {name: [*entries, *above] for name, entries in overrides.items()}
    certificate = options.certificate()
    keyring = access.keyring()
    content_filter = None if access.content_filter is None else make_filter(access.content_filter)
    tracing = observability.start_tracing()
    service = Service(keyring=keyring, state=options.state, content_filter=content_filter, tracing=tracing)
    observability.open_audit_log(service)
    app = create_app(
        service,
        max_body_bytes=options.max_body_mib * 2**20,
        max_held_bytes=options.max_held_mib * 2**20,
        max_connections=connections_below(raise_descriptor_limit(), options.max_connections),
        json_limits=JsonLimits(options.max_text_mib * 2**20, options.max_json_values),
        stall_seconds=options.stall_seconds,
        cors=access.cors,
        public_url=options.checked_public_url(),
        allowed_hosts=access.allowed_hosts(options.host, authenticated=keyring.required),
    )
    if options.speech_quality is not None:
        for name, folder in folders.items():
            overrides[name][:0] = speech_overrides(folder, settings.config, options.speech_quality)
    load = functools.partial(_load, folders=folders, overrides=overrides, settings=settings, imports=imports)
    sys.setswitchinterval(_SWITCH_SECONDS)
    try:
        with decode_processes(media.processes()), media_budget(media.memory()):
            stopped = run(
                app,
                service,
                load,
                host=options.host,
                port=options.port,
                certificate=certificate,
                drain_seconds=options.drain_seconds,
                notify=_notify,
                exits=True,
            )
    finally:
        if tracing is not None:
            tracing.close()
    if stopped:
        if service.loading:
            leave_bar()
        end_process()


def _load(
    service: Service,
    folders: dict[str, str],
    overrides: dict[str, list[str]],
    settings: ModelOptions,
    imports: EarlyImports,
) -> None:
    from omnistage.config.adapters import FOLDERS
    from omnistage.media.decode_pool import active_decode_pool
    from omnistage.omni import AsyncOmni

    imports.finish()
    adapters = overrides_by_model(settings.adapter, list(folders), "--adapter")

    def open_model(name: str, entries: list[str]) -> AsyncOmni:
        return AsyncOmni(
            folders[name],
            config=settings.config,
            overrides=entries,
            device=settings.device,
            dtype=settings.dtype,
            gpu_memory=settings.gpu_memory,
            quantize=settings.quantize,
            ray=settings.ray,
            adapters=adapter_folders(adapters[name]),
            progress=functools.partial(service.report_loading, name),
        )

    for name, folder in folders.items():
        print_note(f"loading {name} from {folder}")
        try:
            omni = open_model(name, overrides[name])
        except ConfigError as error:
            if error.param != FOLDERS or len(folders) == 1:
                raise
            print_note(f"  {name} has no stage for adapters: --adapter-folder is for the other models")
            omni = open_model(name, [*overrides[name], f"{FOLDERS}=[]"])
        for stage in omni.memory:
            print_note(f"  {stage}")
        print_note(f"  {omni.start_times}")
        service.add(name, omni)
    pool = active_decode_pool()
    if pool is not None and any(model.omni.processor.input_modalities - {"text"} for model in service.models.values()):
        pool.start_process()


def _notify(line: str, style: str) -> None:
    print_note(Text(line, style=style))


def overrides_by_model(entries: list[str], names: list[str], param: str = "--set") -> dict[str, list[str]]:
    """The settings of each model: those for all, and those that begin with its name, as in `chat:key=value`."""
    overrides: dict[str, list[str]] = {name: [] for name in names}
    for entry in entries:
        name, colon, rest = entry.partition(":")
        if not colon or "=" in name:
            for values in overrides.values():
                values.append(entry)
        elif name in overrides:
            overrides[name].append(rest)
        else:
            raise InvalidRequestError(f"there is no model {name!r}; models: {', '.join(names)}", param=param)
    return overrides


def speech_overrides(model: str, config: Path | None, quality: str) -> list[str]:
    """The quality as settings of the model's speech stages; none for a model that does not speak."""
    from omnistage.config import CodecStageConfig, OmniEngineArgs, resolve
    from omnistage.core.types import Modality
    from omnistage.models.registry import REGISTRY

    stages = resolve(OmniEngineArgs(model=model, config=config), registry=REGISTRY).config.pipeline.stages
    return [
        f"{name}.quality={quality}"
        for name, stage in stages.items()
        if isinstance(stage, CodecStageConfig) and stage.output is Modality.AUDIO
    ]
