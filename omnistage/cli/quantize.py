"""`omnistage quantize`: a quantised checkpoint, if what it answers is close enough to what the original answers."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from omnistage.cli.common import Report, err, out, progress_bar
from omnistage.cli.options import ModelOptions, option
from omnistage.core.errors import CheckpointError, ConfigError, InternalError, InvalidRequestError
from omnistage.quantisation.schemes import NAMES_IN_WORDS

if TYPE_CHECKING:
    from omnistage.bench.fidelity import Observation
    from omnistage.config.quantize import QuantizeConfig

REPORT_FILE = "quantisation_report.json"
_MAX_PROMPTS = 200
_SHOWN_LAYERS = 10


@dataclass(frozen=True, slots=True)
class GateOptions:
    """How close it must be, and what may be left out for that."""

    calibrate: Path | None = option(
        None, "Your own prompts, one a line; without it a small set of ours is used.", metavar="FILE"
    )
    gate: list[str] = option([], "A limit, like token_agreement=0.95 or kl=0.02. Repeatable.", metavar="NAME=VALUE")
    exclude: list[str] = option([], "Layers that stay: a regular expression. Repeatable.", metavar="PATTERN")
    include: list[str] = option([], "Layers beyond the safe ones, like lm_head. Repeatable.", metavar="PATTERN")
    group_size: int = option(128, "int4: weights that share a scale.")
    steps: int | None = option(None, "Denoising steps of each picture; default: the model's.", min=1, max=200)
    tokens: int = option(48, "Tokens of each answer.", min=2, max=1024)
    search: bool = option(False, "Leave the worst layers out until the gate is passed.", "--search")


def quantize(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A checkpoint's folder, or a name in the hub cache.")],
    gates: GateOptions,
    options: ModelOptions,
    out_folder: Annotated[Path, typer.Option("--out", metavar="DIR", help="The new checkpoint's folder.")],
    scheme: Annotated[str, typer.Option(metavar="SCHEME", help=f"{NAMES_IN_WORDS}.")],
) -> None:
    """Quantise a checkpoint, measure it against the original on the same prompts, and write it if it passes the gate.

    Below the gate nothing is written, the layers with the largest errors are named, and the exit code is 1. It runs on
    the device that the checkpoint is for: a scheme of GPUs is measured on one.

    Examples:

    ```
    omnistage quantize out/model --scheme int8 --out out/model-int8
    omnistage quantize out/model --scheme int8_dynamic --calibrate prompts.txt --gate kl=0.02 --search --out out/small
    ```
    """
    if options.quantize is not None:
        raise InvalidRequestError("is for serve, generate and chat; use --scheme here", param="--quantize")
    if out_folder.exists():
        raise InvalidRequestError(f"{out_folder} exists; name a folder that does not", param="--out")
    limits = parse_gates(gates.gate)
    prompts = read_prompts(gates.calibrate)
    with progress_bar("quantising") as report:
        job = _Job(model, scheme, prompts, gates, options, report)
        try:
            result = job.run(limits)
            if result.failed and gates.search:
                result = job.search(limits)
            if not result.failed:
                result = job.write(out_folder, limits, result.excluded)
            worst = job.errors() if result.failed else {}
        finally:
            job.close()
    out().print(_table(result))
    if result.failed:
        line = f"the gate is not passed ({', '.join(result.failed)}); nothing was written"
        err().print(line, style="bold red", soft_wrap=True)
        for name in list(worst)[:_SHOWN_LAYERS]:
            err().print(f"  {name}: {worst[name]:.2%} of its own output", style="dim", markup=False, soft_wrap=True)
        raise typer.Exit(1)
    out().print(f"wrote {out_folder}", style="green", markup=False)


@dataclass(frozen=True, slots=True)
class Result:
    """A quantised model beside the original."""

    figures: Mapping[str, float]
    limits: Mapping[str, Any]
    before: Observation
    after: Observation
    excluded: Sequence[str] = ()

    @property
    def failed(self) -> list[str]:
        """Quantities beyond their limits."""
        return [name for name, value in self.figures.items() if not self.limits[name].passes(value)]

    def as_json(self) -> dict[str, Any]:
        from omnistage.bench.fidelity import perplexity

        quantities = {
            name: {"value": value, "limit": self.limits[name].limit, "at_least": self.limits[name].at_least}
            for name, value in self.figures.items()
        }
        pairs: dict[str, Any] = {
            "seconds": [self.before.seconds, self.after.seconds],
            "weight_bytes": [self.before.weight_bytes, self.after.weight_bytes],
        }
        if self.before.likelihoods:
            pairs["perplexity"] = [perplexity(self.before), perplexity(self.after)]
        return {"quantities": quantities, "before_and_after": pairs, "layers": self.after.layers}


class _Job:
    """The original's answers, and trials against them."""

    def __init__(
        self, model: str, scheme: str, prompts: Sequence[str], gates: GateOptions, options: ModelOptions, report: Report
    ) -> None:
        from omnistage.bench.fidelity import Observation
        from omnistage.config import ARStageConfig, DiffusionStageConfig
        from omnistage.config.quantize import QuantizeConfig
        from omnistage.models.registry import REGISTRY

        self._prompts, self._gates, self._options, self._report = prompts, gates, options, report
        resolved = options.resolve(model)
        self._model, self._folder = model, resolved.model.folder
        self._full_precision = REGISTRY.family(resolved.model.family).full_precision
        try:
            config = QuantizeConfig.model_validate(
                {
                    "scheme": scheme,
                    "exclude": gates.exclude,
                    "include": gates.include,
                    "group_size": gates.group_size,
                    "required": False,
                }
            )
        except ValueError as error:
            raise ConfigError(" ".join(str(error).split()), param="--scheme") from error
        stages = resolved.config.pipeline.stages
        kinds = (ARStageConfig, DiffusionStageConfig)
        if any(isinstance(stage, kinds) and stage.quantize is not None for stage in stages.values()):
            raise ConfigError("this model is quantised already; quantise the original", param="MODEL")
        self._configs = {name: config for name, stage in stages.items() if isinstance(stage, kinds)}
        self._text = [name for name, stage in stages.items() if isinstance(stage, ARStageConfig)]
        self._original: Observation | None = None
        self._errors: dict[str, float] | None = None
        self._temporary: Path | None = None
        self._last = Observation()
        """Of the last trial."""

    def close(self) -> None:
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)

    def run(self, limits: Mapping[str, Any], excluded: Sequence[str] = ()) -> Result:
        """A trial in memory, over the original's weights, with more layers left out."""
        if self._original is None:
            self._original = self._observe(self._model, (), "original")
        return self._result(self._observe(self._model, self._overrides(excluded), "quantised"), limits, excluded)

    def _overrides(self, excluded: Sequence[str]) -> list[str]:
        from omnistage.bench.fidelity import exclusions

        self._configs = {
            name: config.model_copy(update={"exclude": (*self._gates.exclude, *exclusions(excluded))})
            for name, config in self._configs.items()
        }
        return [f"{name}.quantize={_json(config)}" for name, config in self._configs.items()]

    def _result(self, after: Observation, limits: Mapping[str, Any], excluded: Sequence[str]) -> Result:
        from omnistage.bench.fidelity import compare

        if self._original is None:
            raise ConfigError("nothing was measured")
        return Result(compare(self._original, after), limits, self._original, after, excluded)

    def search(self, limits: Mapping[str, Any]) -> Result:
        """Leave out the 1, 2, 4, 8, ... layers with the largest errors, half of them at most."""
        worst = list(self.errors())
        count, result = 1, None
        while count <= max(1, len(worst) // 2):
            result = self.run(limits, worst[:count])
            if not result.failed:
                return result
            count *= 2
        return result or self.run(limits)

    def errors(self) -> dict[str, float]:
        """Layers by their own errors, the largest first."""
        from omnistage.bench.fidelity import layer_errors, worst_first

        if self._errors is None:
            eager = [f"{name}.{key}=false" for name in self._configs for key in ("cuda_graphs", "compile")]
            # Layers that stand for others, or whose weights are packed, are not the ones that a scheme takes.
            plain = [f"{name}.{key}=false" for name in self._text for key in ("merge_linears", "pack_weights")]
            self._report("layers", 0.0)
            with self._options.load(self._model, overrides=[*eager, *plain], progress=False) as omni:
                error_of = layer_errors(omni, self._configs, self._full_precision, self._prompts[0])
            if not error_of:
                raise InternalError("no layer was found whose error could be measured")
            self._errors = {name: error_of[name] for name in worst_first(error_of)}
        return self._errors

    def write(self, target: Path, limits: Mapping[str, Any], excluded: Sequence[str]) -> Result:
        """The checkpoint, if what was written passes the gate as well: it is loaded and measured like any other."""
        from omnistage.models.quantised_files import write_quantised

        layers = self._last.layers
        target.parent.mkdir(parents=True, exist_ok=True)
        self._temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        folder = self._temporary / target.name
        marks = self._original.marks if self._original is not None else {}
        full = write_quantised(self._folder, folder, layers, self._configs, marks, self._report)
        result = self._result(self._observe(str(folder), (), "written"), limits, excluded)
        if result.after.layers != layers:
            raise CheckpointError("the checkpoint that was written quantises other layers than were measured")
        if not result.failed:
            text = {**self._description(), **result.as_json(), "stored_in_full": full, "files": _hashes(folder)}
            (folder / REPORT_FILE).write_text(json.dumps(text, indent=1), encoding="utf-8")
            folder.rename(target)
        return result

    def _description(self) -> dict[str, Any]:
        import torch

        config = next(iter(self._configs.values()))
        prompt_source = "the user's" if self._gates.calibrate is not None else "ours"
        return {
            "scheme": config.scheme,
            "settings": config.model_dump(mode="json"),
            "original": self._folder.name,
            "prompts": f"{len(self._prompts)}, {prompt_source}",
            "device": self._options.device or "auto",
            "torch": torch.__version__,
        }

    def _observe(self, model: str, overrides: Sequence[str], what: str) -> Observation:
        from omnistage.bench.fidelity import observe

        with self._options.load(model, overrides=overrides, progress=False) as omni:
            observation = observe(
                omni,
                self._prompts,
                self._gates.tokens,
                self._gates.steps,
                lambda doing, done: self._report(f"{what}: {doing}", done),
                self._original,
            )
        if overrides and not observation.layers:
            raise ConfigError("nothing would be quantised in this model", param="--scheme")
        self._last = observation
        return observation


def _json(config: QuantizeConfig) -> str:
    return json.dumps(config.model_dump(mode="json", exclude_none=True))


def _hashes(folder: Path) -> dict[str, str]:
    """Of what decides the answers: weights, and settings, the recipe among them."""
    files = sorted(path for end in ("safetensors", "json") for path in folder.rglob(f"*.{end}"))
    hashes = {}
    for path in files:
        if path.name != REPORT_FILE:
            with path.open("rb") as file:
                hashes[path.relative_to(folder).as_posix()] = hashlib.file_digest(file, "sha256").hexdigest()
    return hashes


def read_prompts(path: Path | None) -> list[str]:
    """One prompt a line; ours without a file."""
    if path is None:
        from omnistage.bench.fidelity import PROMPTS

        return list(PROMPTS)
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"{path} cannot be read as UTF-8 text ({error})", param="--calibrate") from error
    if not 1 <= len(lines) <= _MAX_PROMPTS:
        raise InvalidRequestError(
            f"{path} has {len(lines)} prompts; give 1 to {_MAX_PROMPTS}, one a line", param="--calibrate"
        )
    return lines


def parse_gates(entries: Sequence[str]) -> dict[str, Any]:
    """The default gates with these limits."""
    from omnistage.bench.quality import GATES

    limits = dict(GATES)
    for entry in entries:
        name, _, value = entry.partition("=")
        try:
            limits[name] = replace(GATES[name], limit=float(value))
        except (KeyError, ValueError) as error:
            raise InvalidRequestError(f"{entry!r} is not NAME=VALUE of {', '.join(GATES)}", param="--gate") from error
    return limits


def _table(result: Result) -> Table:
    table = Table(title="quantised against the original")
    for name in ("quantity", "value", "gate", ""):
        table.add_column(name)
    for name, value in result.figures.items():
        gate = result.limits[name]
        verdict = "[bold red]FAIL[/]" if name in result.failed else "[green]ok[/]"
        table.add_row(name, f"{value:.4g}", f"{'≥' if gate.at_least else '≤'} {gate.limit:g}", verdict)
    for name, (before, after) in result.as_json()["before_and_after"].items():
        table.add_row(name, f"{before:.5g} → {after:.5g}")
    layers = sum(map(len, result.after.layers.values()))
    table.add_row("layers", f"{layers} quantised, {len(result.excluded)} left out by the search")
    return table


def check_report(folder: Path) -> dict[str, Any]:
    """The report of a quantised checkpoint, if its files are those that were measured."""
    path = folder / REPORT_FILE
    try:
        report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        hashes, quantities = report["files"], report["quantities"]
        if not isinstance(hashes, dict) or not isinstance(quantities, dict):
            raise TypeError("files and quantities must be tables")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder} is quantised but has no readable {REPORT_FILE} ({error})") from error
    current = _hashes(folder)
    if current != hashes:
        changed = sorted(name for name in {*current, *hashes} if current.get(name) != hashes.get(name))
        raise CheckpointError(f"{', '.join(changed)} in {folder} changed after the report; quantise the original again")
    return report


def quantised_table(folder: Path) -> Table:
    """The report of a quantised checkpoint, whose files are as they were."""
    report = check_report(folder)
    table = Table(title=f"{report['scheme']} against {report['original']}, as measured when it was written")
    for name in ("quantity", "value", "gate"):
        table.add_column(name)
    for name, each in report["quantities"].items():
        table.add_row(name, f"{each['value']:.4g}", f"{'≥' if each['at_least'] else '≤'} {each['limit']:g}")
    return table
