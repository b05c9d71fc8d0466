"""One table of a GPU's figures, beside those of vLLM and vLLM-Omni on the same kind of machine.

    python benchmarks/gpu/table.py --folder /dev/shm/omni7b --out results [--skip diffusion] [--trace]
    python benchmarks/gpu/table.py --from results/*.json --docs docs/performance.md

Runs `serve.py` (twice: the second start finds compiled code), `text.py` and `diffusion.py`, each with a time limit,
or with `--from` reads the JSON files that they have written. A part that fails leaves its rows empty, with the reason.
The rows are in `table_rows.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from table_rows import PARTS, ROWS, Figures, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HERE = Path(__file__).parent
PLOT = HERE.parents[1] / "docs" / "images" / "gpu_table.png"
BEGIN, END = "<!-- gpu/table.py: begin -->", "<!-- gpu/table.py: end -->"
GRACE = 10.0  # seconds for a script and its service to end by themselves
LISTENERS, STREAMS = ("1", "8", "24", "32", "64"), ("1", "64")
HEADER = "| | vLLM-Omni 0.26 as shipped / tuned | vLLM 0.26 | ours | must | met | hardware bound |"
NOTE = (
    "Times over HTTP are medians, the slowest in brackets. A request has 128 prompt tokens, 128 text tokens and 384\n"
    "codec tokens (7.68 s of speech). The hardware bound counts reading weights, keys and values at 4 TB/s, and the\n"
    "arithmetic of prompts and of token2wav (60 TFLOP a request) at 989 TFLOP/s; nothing else."
)
COLOURS = {
    "vLLM-Omni as shipped": "0.8",
    "vLLM-Omni tuned": "0.6",
    "vLLM": "#2a6fbb",
    "ours": "#c2571a",
}


def commands(options: argparse.Namespace) -> list[tuple[str, list[str]]]:
    """The scripts to run: what each one fills, and its command."""
    scale = ["--scale", str(options.scale)]
    out, quick = options.out, options.quick
    serve = [str(HERE / "serve.py"), "--folder", str(options.folder), *scale]
    loads = ["--listeners", *(LISTENERS[:1] if quick else LISTENERS), "--streams", *(STREAMS[:1] if quick else STREAMS)]
    text = [str(HERE / "text.py"), "--variants", "compiled", *scale, "--out", str(out / "text.json")]
    diffusion = [str(HERE / "diffusion.py"), "--out", str(out / "diffusion.json")]
    if quick:
        text += ["--largest", "1"]
        diffusion += ["--layers", "0.05", "--size", "64", "--requests", "2", "--steps", "2", "--no-compile"]
    if options.trace:
        text += ["--trace", str(out / "trace.json")]
    first = [*serve, *loads, "--out", str(out / "serve.json")]
    again = [*serve, "--listeners", "--streams", "--out", str(out / "serve_again.json")]
    parts = [("serve", first), ("serve", again), ("text", text), ("diffusion", diffusion)]
    if options.trace and shutil.which("py-spy"):
        (out / "profile").mkdir(parents=True, exist_ok=True)
        few = ["--listeners", "1" if quick else "8", "--streams", "1" if quick else "64"]
        # By itself and without figures: a profiler takes time of what it looks at.
        parts.append(("serve", [*serve, *few, "--profile", str(out / "profile")]))
    return [(part, command) for part, command in parts if part not in options.skip]


def run(command: Sequence[str], limit: float, environment: dict[str, str]) -> str | None:
    """Run a script with its output on ours; why it failed, if it did."""
    name = Path(command[0]).name
    print(f"=== {' '.join(command)}", flush=True)
    process = subprocess.Popen([sys.executable, *command], env=environment, start_new_session=True)
    try:
        code = process.wait(limit)
    except BaseException as error:  # also when this script is interrupted: a service would keep the GPU's memory
        for end, seconds in ((signal.SIGTERM, GRACE), (signal.SIGKILL, 0.0)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, end)
            time.sleep(seconds)
        process.wait()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        return f"{name} took more than {limit:g} s"
    return f"{name} ended with {code}" if code else None


def run_all(options: argparse.Namespace) -> Figures:
    """Run the scripts and read what they have written, also where they failed later on."""
    options.out.mkdir(parents=True, exist_ok=True)
    reasons = dict.fromkeys(options.skip, "skipped")
    files: list[Path] = []
    with tempfile.TemporaryDirectory() as empty:
        caches = options.caches or Path(empty)  # an empty one, so that the first start compiles
        environment = os.environ | {
            "TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor",
            "TRITON_CACHE_DIR": f"{caches}/triton",
        }
        for part, command in commands(options):
            file = Path(command[command.index("--out") + 1]) if "--out" in command else None
            if file is not None:
                file.unlink(missing_ok=True)  # of an earlier run
                files.append(file)
            reason = run(command, options.limit, environment)
            if reason is not None:
                print(reason, flush=True)
                reasons.setdefault(part, reason)
    return read((file for file in files if file.exists()), reasons)


def read(files: Iterable[Path], reasons: dict[str, str] | None = None) -> Figures:
    """The figures in the scripts' files, each known by what it holds; of two starts the first one comes first."""
    figures = Figures(reasons=dict(reasons or {}))
    for file in files:
        content = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            continue
        if "compiled" in content:
            figures.text = content
        elif "diffusers" in content:
            figures.diffusion = content
        elif "ready_seconds" in content:
            figures.starts.append(content["ready_seconds"])
            figures.serve = content | figures.serve
        else:
            print(f"{file} is left out: it is not from serve.py, text.py or diffusion.py", flush=True)
    return figures


def cells(row: Row, figures: Figures) -> list[str]:
    measured = row.measure(figures)
    sign = "" if not row.must else "≤ " if row.lower_is_better else "≥ "
    must = "" if row.must is None else f"{sign}{row.show(row.must)}"
    bound = "" if row.bound is None else row.show(row.bound)
    if measured is None:
        reason = figures.reasons.get(row.part, "not in the files")
        return [row.title, row.omni_text(), row.vllm_text(), "-", must, f"not measured ({reason})", bound]
    value, note = measured
    verdict = "" if row.must is None else "**yes**" if row.met(value) else "no"
    ours = f"{row.show(value)} ({note})" if note else row.show(value)
    return [row.title, row.omni_text(), row.vllm_text(), ours, must, verdict, bound]


def markdown(figures: Figures) -> str:
    """The table, and a note on what its figures are."""
    lines = [HEADER, "| --- | --- | --- | --- | --- | --- | --- |"]
    lines += [f"| {' | '.join(cells(row, figures))} |" for row in ROWS]
    judged = [row.met(found[0]) for row in ROWS if row.must is not None and (found := row.measure(figures))]
    wanted = sum(row.must is not None for row in ROWS)
    count = f"{sum(judged)} of {wanted} are met, {wanted - len(judged)} were not measured."
    return "\n".join([*lines, "", count, NOTE, ""])


def update_docs(file: Path, table: str) -> None:
    """Put the table between the two markers of a page."""
    text = file.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _old, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{file} has no {BEGIN} and {END}; add them where the table shall be")
    file.write_text(f"{before}{BEGIN}\n{table}{END}{after}", encoding="utf-8")


def plot(figures: Figures, file: Path) -> None:
    """Bars of ours and the peers' by panel, with a line at what must be reached and a dotted one at the bound."""
    from matplotlib.figure import Figure

    panels: dict[str, list[Row]] = {}
    for row in ROWS:
        if row.panel:
            panels.setdefault(row.panel, []).append(row)
    figure = Figure(figsize=(12, 7.5), layout="constrained")
    places = list(figure.subplots(2, 3).flat)
    for (title, rows), axes in zip(panels.items(), places, strict=True):
        draw_panel(axes, title, rows, figures)
    shown = [pair for axes in places for pair in zip(*axes.get_legend_handles_labels(), strict=True)]
    handles = {label: handle for handle, label in shown}
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=len(handles), frameon=False)
    figure.savefig(file, dpi=110)


def draw_panel(axes: Axes, title: str, rows: Sequence[Row], figures: Figures) -> None:
    lower = rows[0].lower_is_better
    axes.set_title(f"{title} ({'lower' if lower else 'higher'} is better)", loc="left", fontsize=10)
    background = {"facecolor": "white", "edgecolor": "none", "pad": 0.5, "alpha": 0.8}
    axes.spines[["top", "right"]].set_visible(False)
    for place, row in enumerate(rows):
        measured = row.measure(figures)
        ours = None if measured is None else measured[0]
        values = dict(zip(COLOURS, (*row.omni, row.vllm, ours), strict=True))
        bars = [(name, value) for name, value in values.items() if value is not None]
        width = 0.8 / max(3, len(bars))
        for index, (name, value) in enumerate(bars):
            left = place + (index - (len(bars) - 1) / 2) * width
            axes.bar(left, value, width, color=COLOURS[name], label=name)
            number = row.show(value).split(" ")[0]
            axes.text(left, value, number, ha="center", va="bottom", fontsize=8, zorder=3, bbox=background)
        for level, style, name in ((row.must, "-", "must"), (row.bound, ":", "hardware bound")):
            if level is not None:
                axes.hlines(level, place - 0.45, place + 0.45, color="#222222", linestyle=style, label=name)
    axes.set_xticks(range(len(rows)), [row.label for row in rows])
    axes.set_xlim(-0.6, len(rows) - 0.4)
    axes.margins(y=0.12)
    axes.set_ylim(bottom=0)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm/omni7b"), help="written if it is not there")
    parser.add_argument("--out", type=Path, default=Path("results"), help="a folder for the figures and table.md")
    parser.add_argument("--from", dest="files", type=Path, nargs="+", default=None, help="only read these files")
    parser.add_argument("--skip", nargs="*", choices=PARTS, default=[])
    parser.add_argument("--limit", type=float, default=400.0, help="seconds for each script")
    parser.add_argument("--caches", type=Path, default=None, help="a folder of compiled code; default: an empty one")
    parser.add_argument("--trace", action="store_true", help="profiles of decode steps, and with py-spy of the service")
    parser.add_argument("--docs", type=Path, default=None, help="a page whose table is replaced")
    parser.add_argument("--plot", type=Path, default=PLOT)
    parser.add_argument("--no-plot", action="store_true")
    parser.add_argument("--scale", type=float, default=1.0, help="1 is the true 7B")
    parser.add_argument("--quick", action="store_true", help="the smallest loads, to try the script out")
    return parser.parse_args()


def main() -> None:
    options = parse()
    figures = run_all(options) if options.files is None else read(options.files)
    table = markdown(figures)
    print(table, flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "table.md").write_text(table, encoding="utf-8")
    if options.docs is not None:
        update_docs(options.docs, table)
    if not options.no_plot:
        try:
            plot(figures, options.plot)
        except ModuleNotFoundError as error:
            print(f"no plot: {error}; run again with --from where matplotlib is installed", flush=True)


if __name__ == "__main__":
    main()
