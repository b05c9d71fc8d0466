"""The codec scheduler against listeners: first sound, stutter and throughput on a simulated device.

The real scheduler with an injected clock. N listeners ask at once, and again when they have been answered, as
`omnistage bench serve` does; a step of the models is a code for each of them; a batch of windows takes as long as the
cost line says. The player starts at the first sample and waits whenever the next one is missing.

    python benchmarks/codec_clock.py
    python benchmarks/codec_clock.py --tree ../before    # the scheduler of another checkout
    python benchmarks/codec_clock.py --fixed 0.06 --block 0.003 --spread 2

Language models and codec share the device: while a batch runs, codes come at `--share` of their pace. `--fast-step` is
the talker's step once the text, `--text` tokens, is there.

`--max-hold 0 --waves 1` holds nothing back: the first sound and what was waited after it, together, are the earliest
start after which nobody waits, had the scheduler known what was coming.

`--fixed`, `--block`, `--square` are seconds: of a batch, of each block in it, and of each block for each block of its
window, where attention is over a whole window. Without options: Qwen2.5-Omni on one H200, as docs/performance.md has
it.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

BLOCK_CODES, CODE_SECONDS = 12, 0.02
CODES = 384


@dataclass
class Listener:
    name: str
    asked: float
    codes: int
    text: int
    """Codes for which a token of the text is generated, too."""
    fed: int = 0
    first_sound: float | None = None
    dry_at: float = 0.0
    waited: float = 0.0
    ended: float = 0.0
    wave: int = 1

    def again(self, now: float) -> Listener:
        """The same client's next request."""
        return Listener(f"{self.name}+", now, self.codes, self.text, wave=self.wave + 1)

    def hear(self, now: float, seconds: float) -> None:
        if self.first_sound is None:
            self.first_sound, self.dry_at = now - self.asked, now
        self.waited += max(0.0, now - self.dry_at)
        self.dry_at = max(self.dry_at, now) + seconds


@dataclass
class Device:
    fixed: float
    block: float
    square: float
    busy: float = 0.0
    batches: int = 0
    blocks: int = field(default=0)

    def run(self, windows: Any) -> float:
        sizes = [-(-len(window.codes) // BLOCK_CODES) for window in windows]
        self.batches += 1
        self.blocks += sum(sizes)
        seconds = self.fixed + self.block * sum(sizes) + self.square * sum(size * size for size in sizes)
        self.busy += seconds
        return seconds


def budget(options: argparse.Namespace) -> SimpleNamespace:
    return SimpleNamespace(
        max_batch=options.max_batch,
        max_batch_blocks=192,
        max_running=64,
        first_chunk_blocks=1,
        max_chunk_blocks=options.max_chunk,
        lookahead_blocks=options.lookahead,
        max_hold_seconds=options.max_hold,
    )


def layout(mixed: bool) -> Any:
    from omnistage.engines.codec.component import CodecLayout

    common = {"block_codes": BLOCK_CODES, "codebook_size": 8193, "max_codes": 16384, "code_seconds": CODE_SECONDS}
    if mixed:
        return CodecLayout(**common, max_lookahead_blocks=1024, mixed_windows=True)
    return CodecLayout(**common, max_lookahead_blocks=1024, history_blocks=2)


def simulate(listeners: list[Listener], device: Device, options: argparse.Namespace, noise: random.Random) -> None:
    """Clients whose answer has ended ask again, and are added to `listeners`, until each has had its waves."""
    from omnistage.engines.codec.scheduler import CodecScheduler

    now = 0.0
    models, next_step = 0.0, 0.0
    """How much of the time the language models have had, and when their next step ends, by that."""
    clocked = hasattr(CodecScheduler, "release")
    scheduler: Any = CodecScheduler(layout(clocked), budget(options), clock=lambda: now)
    if sizes := options.windows:
        scheduler.chunk_blocks = lambda index: sizes[min(index, len(sizes) - 1)]
    if clocked and not options.cold:
        for blocks in (3, 40, 192):  # what it has learned before
            scheduler.costs.observe(blocks, device.fixed + device.block * blocks)
        if hasattr(scheduler, "pace"):
            steps = [step_seconds(len(listeners), slow, options) for slow in (True, False)]
            seconds = options.text * steps[0] + (CODES - options.text) * steps[1]
            scheduler.pace.observe(CODES, seconds, beside_batch=False)
            scheduler.pace.observe(CODES, seconds / max(options.share, 0.01), beside_batch=True)
    waiting = sorted(listeners, key=lambda listener: -listener.asked)
    active: list[Listener] = []
    held: dict[str, float] = {}
    by_name = {listener.name: listener for listener in listeners}

    def feed() -> None:
        """A step of the models is a code for each listener whose prompt has been computed."""
        nonlocal next_step
        while True:
            arrived = 0
            while waiting and waiting[-1].asked <= now:
                active.append(waiting.pop())
                arrived += 1
            if arrived:
                next_step = max(next_step, models) + options.prefill * arrived
            if not active or next_step > models:
                return
            for listener in active:
                if not listener.fed:
                    scheduler.add(listener.name, None)
                listener.fed += 1
                scheduler.extend(listener.name, [0], final=listener.fed == listener.codes)
            active[:] = [listener for listener in active if listener.fed < listener.codes]
            slow = any(listener.fed < listener.text for listener in active)
            next_step += step_seconds(len(active), slow, options) * (1 + options.jitter * noise.random())

    def emit(name: str) -> None:
        if held.get(name):
            by_name[name].hear(now, held.pop(name))

    while any(not listener.ended for listener in listeners):
        feed()
        if not scheduler.has_work():
            limit = scheduler.wait_limit()
            pauses = [next_step - models] if active else []
            pauses += [waiting[-1].asked - now] if waiting else []
            pause = max(0.0, min(pauses if limit is None else [*pauses, limit])) + 1e-9
            now, models = now + pause, models + pause
            continue
        output = scheduler.schedule()
        if output.windows:
            taken = device.run(output.windows) * (1 + options.noise * noise.random())
            now, models = now + taken, models + options.share * taken
        seconds = {w.request_id: w.emit * CODE_SECONDS for w in output.windows}
        for name, length in seconds.items():
            held[name] = held.get(name, 0.0) + length
        if clocked:
            feed()
            scheduler.update(output, (), seconds)
            for window in output.windows:
                if window.last or scheduler.playing(window.request_id):
                    emit(window.request_id)
            for name in scheduler.release():
                emit(name)
        else:
            scheduler.update(output, ())
            for name in seconds:
                emit(name)
        for window in output.windows:
            if window.last:
                listener = by_name[window.request_id]
                listener.ended = now
                if listener.wave < options.waves:
                    next_one = listener.again(now)
                    listeners.append(next_one)
                    waiting.insert(0, next_one)
                    waiting.sort(key=lambda one: -one.asked)
                    by_name[next_one.name] = next_one


def step_seconds(active: int, slow: bool, options: argparse.Namespace) -> float:
    """Of the models, for so many requests; slow while a text is generated."""
    if slow:
        return float(options.step + active * options.row)
    return float(options.fast_step + active * options.fast_row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", help="a checkout whose scheduler is simulated; default: this one")
    parser.add_argument("--fixed", type=float, default=0.028)
    parser.add_argument("--block", type=float, default=0.0021)
    parser.add_argument("--square", type=float, default=0.0)
    parser.add_argument("--step", type=float, default=0.0063, help="seconds of the models for a code")
    parser.add_argument("--row", type=float, default=125e-6, help="and for each request in it")
    parser.add_argument("--text", type=int, default=128, help="codes for which the text's model runs, too")
    parser.add_argument("--fast-step", type=float, default=0.00175, help="seconds of a code after those")
    parser.add_argument("--fast-row", type=float, default=56e-6, help="and for each request in it")
    parser.add_argument("--share", type=float, default=0.12, help="of the device that the models get beside a batch")
    parser.add_argument("--noise", type=float, default=0.0, help="batches take up to so much longer, by chance")
    parser.add_argument("--jitter", type=float, default=0.0, help="steps take up to so much longer, by chance")
    parser.add_argument("--waves", type=int, default=2, help="requests of each client, one after the other")
    parser.add_argument("--prefill", type=float, default=0.006, help="seconds of the models for each prompt")
    parser.add_argument("--spread", type=float, default=0.0, help="requests come at random within so many seconds")
    parser.add_argument("--lengths", action="store_true", help="utterances of random length instead of 7.68 s")
    parser.add_argument("--max-chunk", type=int, default=8)
    parser.add_argument("--windows", type=int, nargs="+", help="blocks of the windows; default: the scheduler's own")
    parser.add_argument("--lookahead", type=int, default=1, help="blocks that a window sees ahead of what it emits")
    parser.add_argument("--max-hold", type=float, default=3.0, help="seconds for which first sound may be held back")
    parser.add_argument("--max-batch", type=int, default=64)
    parser.add_argument("--seeds", type=int, default=1, help="runs with other random numbers")
    parser.add_argument("--cold", action="store_true", help="the scheduler has not learned any cost before")
    parser.add_argument("--listeners", type=int, nargs="+", default=[1, 8, 24, 32, 64])
    options = parser.parse_args()
    if options.tree:
        sys.path.insert(0, options.tree)
    print("listeners  first sound median/max  stutter      waited max  requests/s  blocks a request  batches")
    for count, seed in itertools.product(options.listeners, range(options.seeds)):
        generator = random.Random(seed)
        listeners = []
        for i in range(count):
            asked = generator.uniform(0, options.spread)
            codes = generator.randint(100, 2 * CODES - 100) if options.lengths else CODES
            listeners.append(Listener(str(i), asked, codes, options.text))
        device = Device(options.fixed, options.block, options.square)
        simulate(listeners, device, options, generator)
        total = len(listeners)
        sounds = sorted(listener.first_sound or 0.0 for listener in listeners)
        stutter = sum(listener.waited > 1e-6 for listener in listeners) / total
        share = sum(listener.waited for listener in listeners) / sum(one.codes * CODE_SECONDS for one in listeners)
        longest = max(listener.ended for listener in listeners)
        print(
            f"{count:>9}  {sounds[total // 2]:>10.3f} {sounds[-1]:>10.3f}   {100 * stutter:>5.0f}% ({100 * share:.1f}%)"
            f"  {max(listener.waited for listener in listeners):>9.3f}  {total / longest:>10.2f}"
            f"  {device.blocks / total:>16.1f}  {device.batches:>7}"
        )


if __name__ == "__main__":
    main()
