"""Options of `omnistage serve` by what they guard: access, media, observability."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from omnistage.cli.common import err
from omnistage.cli.options import option
from omnistage.core.errors import InvalidRequestError, MissingDependencyError

if TYPE_CHECKING:
    from omnistage.server.access.jwt import TokenVerifier
    from omnistage.server.access.keys import Keyring
    from omnistage.server.observe.tracing import Tracing
    from omnistage.server.service import Service


@dataclass(frozen=True, slots=True)
class AccessOptions:
    """Who may call the service, and for what."""

    PANEL: ClassVar[str] = "Access"
    api_key: list[str] = option([], "A key that clients must send. Repeatable.")
    api_keys: Path | None = option(None, "A YAML file of keys, with rates and models.", metavar="FILE")
    jwt_key: Path | None = option(
        None, "Accept JSON web tokens, verified with this public key (PEM or JWKS).", metavar="FILE"
    )
    jwt_secret_env: str | None = option(
        None, "Or verified with the HS256 secret in this environment variable.", metavar="NAME"
    )
    jwt_audience: str | None = option(None, "Audience that tokens must name.")
    jwt_issuer: str | None = option(None, "Issuer that tokens must name.")
    jwt_requests_per_minute: float | None = option(None, "Maximum requests per minute of one token holder.", min=0.01)
    jwt_max_concurrent: int | None = option(None, "Maximum concurrent requests of one token holder.", min=1)
    cors: list[str] = option([], "A web origin whose pages may call the API. Repeatable.", metavar="ORIGIN")
    allow_host: list[str] = option(
        [], "A further host name to accept where only loopback names are. Repeatable.", metavar="NAME"
    )
    adapter_folder: list[Path] = option(
        [], "Let clients load LoRA adapters from below this folder while it runs. Repeatable.", metavar="DIR"
    )
    content_filter: str | None = option(
        None, "Content filter, like wordlist:FILE; default: none.", metavar="NAME[:ARG]"
    )

    def adapter_overrides(self) -> list[str]:
        """As settings that stand above everything else: a model's configuration does not open folders to clients."""
        for folder in self.adapter_folder:
            if not folder.is_dir():
                raise InvalidRequestError(f"{folder} is not a folder", param="--adapter-folder")
        folders = [str(folder.resolve()) for folder in self.adapter_folder]
        return [f"deployment.adapter_folders={json.dumps(folders)}"]

    def keyring(self) -> Keyring:
        from omnistage.server.access.keys import load_keys

        return load_keys(self.api_key, self.api_keys, self._tokens())

    def _tokens(self) -> TokenVerifier | None:
        if self.jwt_key is None and self.jwt_secret_env is None:
            for name, value in (("audience", self.jwt_audience), ("issuer", self.jwt_issuer)):
                if value is not None:
                    raise InvalidRequestError("requires --jwt-key or --jwt-secret-env", param=f"--jwt-{name}")
            return None
        if self.jwt_key is not None and self.jwt_secret_env is not None:
            raise InvalidRequestError("give --jwt-key or --jwt-secret-env, not both", param="--jwt-key")
        from omnistage.server.access.jwt import TokenVerifier, read_keys, secret_key

        return TokenVerifier(
            read_keys(self.jwt_key) if self.jwt_key is not None else [secret_key(self.jwt_secret_env or "")],
            audience=self.jwt_audience,
            issuer=self.jwt_issuer,
            rate=self.jwt_requests_per_minute,
            max_concurrent=self.jwt_max_concurrent,
        )

    def allowed_hosts(self, host: str, *, authenticated: bool) -> list[str] | None:
        """Host names to accept beside the loopback ones; None: any, for keys protect it or other machines call it."""
        from omnistage.server.access.hosts import is_loopback

        if is_loopback(host) and not authenticated:
            return self.allow_host
        if self.allow_host:
            raise InvalidRequestError(
                "is for a service without keys on a loopback address; any other accepts every host name",
                param="--allow-host",
            )
        return None


@dataclass(frozen=True, slots=True)
class MediaOptions:
    """Where requests may take media from, beside their own bodies, and what decodes them."""

    PANEL: ClassVar[str] = "Remote and local media"
    media_host: list[str] = option(
        [], "Fetch media from https URLs of this host, or *.example.org. Repeatable.", metavar="HOST"
    )
    media_http: bool = option(False, "Also from http URLs of these hosts.", "--media-http")
    media_path: list[Path] = option([], "Read media files below this folder. Repeatable.", metavar="DIR")
    decode_processes: int | None = option(
        None,
        "Processes that decode media; default: one for each core, 2 to 16. 0: the service itself, which a hostile file "
        "can stop.",
        min=0,
        max=256,
        metavar="N",
    )
    max_media_mib: int | None = option(
        None,
        "Memory for decoded media of all requests in MiB, half of it for one; default: a quarter of the machine's.",
        min=64,
        max=2**24,
    )

    def memory(self) -> int:
        """Bytes for the decoded media of all requests."""
        from omnistage.media.budget import default_media_bytes

        return default_media_bytes() if self.max_media_mib is None else self.max_media_mib * 2**20

    def processes(self) -> int:
        """How many processes decode media."""
        from omnistage.media.decode_pool import default_processes

        if self.decode_processes is None:
            return default_processes()
        if self.decode_processes and not default_processes():
            raise InvalidRequestError("is not supported on this system; leave it out", param="--decode-processes")
        return self.decode_processes

    def overrides(self) -> list[str]:
        """As settings that stand above everything else."""
        from omnistage.media.hosts import HostRule

        for host in self.media_host:
            try:
                HostRule.parse(host)
            except ValueError as error:
                raise InvalidRequestError(str(error), param="--media-host") from error
        if self.media_http and not self.media_host:
            raise InvalidRequestError("requires --media-host; name the hosts", param="--media-http")
        for folder in self.media_path:
            if not folder.is_dir():
                raise InvalidRequestError(f"{folder} is not a folder", param="--media-path")
        values: dict[str, object] = {
            "allow_urls": bool(self.media_host),
            "url_hosts": self.media_host,
            "allow_http_urls": self.media_http,
            "allow_private_urls": False,
            "allow_paths": bool(self.media_path),
            "allowed_path_roots": [str(folder.resolve()) for folder in self.media_path],
        }
        return [f"limits.media.{key}={json.dumps(value)}" for key, value in values.items()]


@dataclass(frozen=True, slots=True)
class ObservabilityOptions:
    """What the service reports of itself."""

    PANEL: ClassVar[str] = "Observability"
    audit_log: Path | None = option(None, "Append one JSON line per request: who, what, outcome.", metavar="FILE")
    audit_on_error: str = option(
        "warn", "When the audit log cannot be written: warn, or stop accepting requests.", metavar="warn|stop"
    )
    otel_endpoint: str | None = option(None, "Send OpenTelemetry spans to this collector.", metavar="URL")

    def open_audit_log(self, service: Service) -> None:
        """Write the audit log from now on, if there is to be one."""
        if self.audit_on_error not in ("warn", "stop"):
            raise InvalidRequestError("must be warn or stop", param="--audit-on-error")
        service.audit_required = self.audit_on_error == "stop"
        if self.audit_log is not None:
            from omnistage.server.observe.audit import log_to

            service.audit_file = log_to(self.audit_log)
        elif service.audit_required:
            raise InvalidRequestError("requires --audit-log; name the file", param="--audit-on-error")

    def start_tracing(self) -> Tracing | None:
        """Spans, where the option or OpenTelemetry's variables set it."""
        if self.otel_endpoint is None and not otel_in_environment():
            return None
        try:
            from omnistage.server.observe.tracing import start_tracing
        except MissingDependencyError as error:
            if self.otel_endpoint is not None:
                raise
            # The variables may be meant for other programs.
            err().print(f"no traces are sent: {error.message}", style="yellow", markup=False)
            return None
        return start_tracing(self.otel_endpoint)


def otel_in_environment() -> bool:
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or os.environ.get("OTEL_TRACES_EXPORTER") == "none":
        return False
    return any(os.environ.get(f"OTEL_EXPORTER_OTLP_{name}ENDPOINT") for name in ("", "TRACES_"))
