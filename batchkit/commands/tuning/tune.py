"""The ``tune`` command: finds the engine options with which a job runs fastest on this machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from batchkit.commands import Say
from batchkit.commands.trial import OK, OOM, Trial, Trials, trials_folder, trials_of
from batchkit.commands.tuning.find import LEAST_GAIN, bottleneck_of
from batchkit.commands.tuning.known import TUNE, Known, Options, Tried, draw, words
from batchkit.commands.tuning.options import (
    SIZE,
    OptionChoice,
    check_patch,
    choices,
    most_of,
    next_of,
    patch,
    with_options,
    write_patch,
)
from batchkit.commands.tuning.table import line_of
from batchkit.config.numbers import number
from batchkit.config.tables import (
    JobConfig,
    OutputTable,
    SamplingTable,
    ScoringTable,
)
from batchkit.engines.registry import changing_options, speed_options
from batchkit.errors import JobError
from batchkit.execution.places import engines_of
from batchkit.execution.run import tried
from batchkit.execution.start import StartOptions
from batchkit.runs.compare import compare
from batchkit.scoring.metrics import markdown

_FACTORS, _FINE = (4.0, 2.0), 1.4
_BUDGET = "max_num_batched_tokens"
_MOST_TRIALS = 20  # before the comparison
_LEAST_OF_FLIP = (
    0.015  # lower than LEAST_GAIN, because a setting that is not a number needs only one trial
)
_ROUNDS = 3  # rounds of default and best, in turn
_ROWS_COMPARED = 50
_DRAWN = ("temperature", "n", "seed", "top_p", "top_k", "min_p")  # greedy decoding ignores these


@dataclass(frozen=True, slots=True)
class DefaultComparison:
    """The speedup of the best options over the default: median, lowest and highest of several rounds.

    In each round, both are measured one after the other.
    """

    ratio: float
    low: float
    high: float


@dataclass(slots=True)
class Tuned:
    """The result of ``tune``.

    - ``compared``: the final comparison with the default; None if there was none.
    - ``gained``: for each of the best options, the rate without that option, divided by the rate with all of them.
    - ``differ``: the fraction of rows whose answers the best options change; None if these options can't change
      answers.
    - ``written``: the job file that received the best options.
    """

    job: JobConfig
    trials: list[Tried] = field(default_factory=list)
    best: dict[str, Any] = field(default_factory=dict)
    compared: DefaultComparison | None = None
    gained: dict[str, float] = field(default_factory=dict)
    differ: float | None = None
    signum: int | None = None
    written: Path | None = None
    picture: Path | None = None

    @property
    def limit(self) -> str:
        """The bottleneck with the default options, in words."""
        return next((tried.limit for tried in self.trials if not tried.options), "")

    @property
    def is_gain(self) -> bool:
        """True if the best options were faster than the default in every round."""
        return self.compared is not None and self.compared.low > 1

    @property
    def exit_code(self) -> int:
        if self.signum is not None:
            return 128 + self.signum
        return 0 if any(tried.status == OK for tried in self.trials) else 1

    def to_json(self) -> dict[str, Any]:
        return {
            "default": self._newest({}),
            "best": self._newest(self.best if self.is_gain else {}),
            "ratio": self.compared.ratio if self.compared is not None and self.is_gain else 1.0,
            "compared": None if self.compared is None else asdict(self.compared),
            "gained": self.gained,
            "limit": self.limit,
            "picture": None if self.picture is None else str(self.picture),
            "differ": self.differ,
            "trials": [asdict(tried) for tried in self.trials],
            "serve": self._serve(),
            "interrupted": self.signum is not None,
            "written": None if self.written is None else str(self.written),
        }

    def to_text(self) -> str:
        return "\n".join(self._lines())

    def _newest(self, options: Options) -> dict[str, Any]:
        found = [t for t in self.trials if t.options == options and t.status == OK]
        return asdict(found[-1]) if found else {"options": dict(options), "rows_per_s": None}

    def _lines(self) -> Iterator[str]:
        heads = ["options", "status", "rows/s", "90 %", "time"]
        yield markdown(heads, [_cells(tried) for tried in self.trials])
        yield from (f"{words(t.options)}: {t.status}" for t in self.trials if t.status != OK)
        if self.limit:
            yield f"bottleneck of the default: {self.limit}"
        if self.picture is not None:
            yield f"chart: {self.picture}"
        if self.compared is None:
            yield "no tried option is clearly faster than the default"
            return
        found = self.compared
        times = f"{found.ratio:.2f} × the default ({found.low:.2f} to {found.high:.2f} in {_ROUNDS} alternating rounds)"
        if not self.is_gain:
            yield f"{words(self.best)}: {times}, which may be chance; keep the default"
            return
        yield f"{words(self.best)}: {times}"
        if self.differ is not None:
            yield f"{self.differ:.0%} of the answers differ (greedy, the first {_ROWS_COMPARED} rows)"
        yield from (
            f"without {name}: {share:.2f} of this speed" for name, share in self.gained.items()
        )
        if self.written is not None:
            yield f"{self.written}: written"
        else:
            yield f"set this in the job file (--write does it):\n\n{patch(self.best)}"
        if self.job.engine.kind == "vllm":
            yield f"vLLM's server with these options: {self._serve()}"

    def _serve(self) -> str:
        best = dict(self.best if self.is_gain else {})
        if (workers := best.pop("workers.count", 1)) > 1:
            best["data_parallel_size"] = workers
        flags = (
            f"--{'no-' * (value is False)}{name.replace('_', '-')}"
            + ("" if isinstance(value, bool) else f" {value}")
            for name, value in best.items()
            if "." not in name
        )
        return " ".join(["vllm serve", self.job.engine.model, *flags])


class SearchLimits(NamedTuple):
    """The limits of a search: its length, the rows to use (None for all), and the seconds of measurement per trial."""

    minutes: float
    rows: int | None
    seconds: float


def tune(
    job: JobConfig,
    limits: SearchLimits,
    *,
    allow_changes: bool = False,
    write_to: Path | None = None,
    options: Mapping[str, Any] | None = None,
    trials_of: Callable[[JobConfig, int | None, str], AbstractContextManager[Trials]] = trials_of,
    say: Say = lambda text: None,
) -> Tuned:
    """Search for the best engine options.

    Each trial starts a new engine. The runs of the trials are kept in the
    folder ``tune`` inside the job's run folder, their results in ``trials.jsonl`` there; the next call reuses the
    results. A signal ends the search with the results so far.

    - ``allow_changes``: also try options that change answers, and count the changed answers.
    - ``write_to``: job file that receives the best options, if they beat the default in each of three rounds.
    - ``options``: the options to try and their values, as ``speed_options`` returns them (the default).
    - ``trials_of``: starts the trials.

    Raises:
        JobError: The job itself is invalid, its input has no rows, or the job file can't be written.
    """
    if allow_changes and (job.task != "generate" or job.has_several):
        raise JobError(
            "--allow-changes: changed answers are counted only for one generated text per row; leave it out for this"
            " job"
        )
    if write_to is not None:
        check_patch(write_to)
    found, changes = Tuned(job), dict[str, Any]()
    with trials_of(job, limits.rows, TUNE) as trials:
        if allow_changes:
            changes |= changing_options(job)
        tries = speed_options(job) if options is None else options
        space = choices(job, {**tries, **changes})
        _Search(found, trials, space, limits, say).run()
    found.signum = trials.signum
    if found.is_gain and found.signum is None and found.best.keys() & changes.keys():
        found.differ = _share_that_differs(job, found.best, say)
    if write_to is not None and found.is_gain and found.signum is None:
        write_patch(write_to, found.best)
        found.written = write_to
    if found.trials:
        found.picture = draw(job, found.trials, found.best if found.is_gain else {})
    return found


class _Search:
    """A greedy search that changes one option at a time, starting from the fastest options so far.

    A number is multiplied or divided as long as the job gets faster. Other values are tried once each. Options that
    address another bottleneck than the current one are skipped.
    """

    def __init__(
        self,
        found: Tuned,
        trials: Trials,
        space: Sequence[OptionChoice],
        limits: SearchLimits,
        say: Say,
    ) -> None:
        self._found, self._trials, self._say = found, trials, say
        self._space, self._seconds = [*space], limits.seconds
        self._until = time.monotonic() + 60 * limits.minutes
        self._size = next((choice.walk for choice in space if choice.name == SIZE), None) or 1
        self._known = Known(found.job)
        self._tried = dict[str, Tried]()
        self._small = dict[str, Any]()

    def run(self) -> None:
        if self._try({}) == 0.0:
            return
        most, _ = most_of(self._found.job, self._trials.rows)
        while (choice := next_of(self._space, self._best.waits_for)) is not None:
            if choice.walk is not None and choice.is_only:
                self._walk(choice.name, choice.walk, 2, self._trials.rows, choice.helps)
            elif choice.walk is not None and choice.most is not None:
                self._walk(choice.name, choice.walk, 2, choice.most)
            elif choice.walk is not None:
                self._walks(choice.name, choice.walk, most if choice.name == SIZE else None)
            for options in choice.others:
                self._takes(options, _LEAST_OF_FLIP)
        if len(self._small) > 1:
            self._takes(dict(self._small), _LEAST_OF_FLIP)
        size = self._found.best.get(SIZE, self._size)
        if not self._walk(SIZE, size, _FINE, most):
            self._walk(SIZE, size, 1 / _FINE, None)
        if self._found.best:
            self._compare()

    @property
    def _best(self) -> Tried:
        return self._tried[words(self._found.best)]

    def _walks(self, name: str, value: int, most: int | None) -> None:
        """Search for the best value of the option ``name``, starting at ``value``. Multiply or divide it by a large
        factor as long as the job gets faster, then by a smaller factor. A small factor alone may gain too little to
        notice.

        Two options have a special rule. If the KV cache is full, the search tries as many concurrent requests as the
        cache held, and then only fewer. If prompts take most of the time, the number of tokens per forward pass is
        never reduced. ``most``: the largest value to try.
        """
        if name == SIZE and self._best.waits_for == "kv-cache" and (held := self._best.running):
            self._takes({name: held})
            self._walk(name, self._found.best.get(name, value), 1 / 2, None)
            return
        grows_only = name == _BUDGET and self._best.waits_for == "prefill"
        for factor in _FACTORS:
            value = self._found.best.get(name, value)
            if not self._walk(name, value, factor, most) and not grows_only:
                self._walk(name, value, 1 / factor, None)

    def _walk(
        self, name: str, value: int, factor: float, most: int | None, against: str = ""
    ) -> bool:
        """Multiply the option's ``value`` by ``factor`` as long as this gains. Return True if the first change gained.

        ``most``: the largest value to try. ``against``: a bottleneck; stop when it is no longer the bottleneck.
        """
        steps = 0
        while (after := int(value * factor)) >= 1 and (most is None or after <= most):
            if against not in ("", self._best.waits_for) or not self._takes({name: after}):
                break
            value, steps = after, steps + 1
        return steps > 0

    def _takes(self, change: Options, least: float = LEAST_GAIN) -> bool:
        """Try the best options with ``change``. If this gains more than ``least``, keep the change and return True."""
        if not self._is_time():
            return False
        options = {n: v for n, v in {**self._found.best, **change}.items() if v is not None}
        gain = self._try(options) / self._try(self._found.best) - 1
        if gain > least:
            self._found.best = options
        elif gain > 0:  # several small gains may add up
            self._small |= change
        return gain > least

    def _is_time(self) -> bool:
        """Return True if there is time for another trial and the final comparison, assuming that each trial takes as
        long as the earlier ones did."""
        if len(self._tried) >= _MOST_TRIALS:
            return False
        took = statistics.mean([tried.seconds for tried in self._found.trials] or [self._seconds])
        return time.monotonic() + took * (1 + 2 * _ROUNDS) < self._until

    def _try(self, options: Options) -> float:
        """Return the rate with ``options`` in rows per second; 0 if the trial failed. Stored results are not measured
        again.

        A trial stops early when it is clearly slower than the best options.
        """
        key = words(options)
        if key not in self._tried:
            best = self._tried.get(words(self._found.best))
            least = (best.rows_per_s or 0.0) if best is not None else 0.0
            tried = self._known.of(options) or self._measured(options, least)
            while tried.is_short and self._is_time():
                self._seconds *= 2  # also for later trials, because they are compared
                self._say(f"the engine was not filled in time; trials now last {self._seconds:g} s")
                tried = self._measured(options, least)
            if tried not in self._found.trials:
                self._found.trials.append(tried)
            self._tried[key] = tried
        return self._tried[key].rows_per_s or 0.0

    def _measured(self, options: Options, least: float = 0.0) -> Tried:
        self._say(f"{words(options)}: starting an engine")
        job = with_options(self._found.job, options)
        at_once = options.get(SIZE, self._size) * engines_of(job)
        trial = self._trials.run(job, at_once, self._seconds, least)
        tried = _tried(job, options, at_once, trial)
        self._known.keep(tried)
        rate = f"{number(tried.rows_per_s)} rows/s" if tried.status == OK else tried.status
        self._say(f"{words(options)}: {rate}")
        return tried

    def _compare(self) -> None:
        """Measure the default and the best options in turn, several times. Then measure the best options with one of
        them left out, for each."""
        best, ratios, rates = self._found.best, list[float](), list[float]()
        for _ in range(_ROUNDS):
            pair = [self._measured(options) for options in ({}, best)]
            self._found.trials += pair
            default, tuned = (tried.rows_per_s or 0.0 for tried in pair)
            if not default or not tuned:
                return
            ratios.append(tuned / default)
            rates.append(tuned)
        found = (statistics.median(ratios), min(ratios), max(ratios))
        self._found.compared = DefaultComparison(*(round(ratio, 4) for ratio in found))
        self._known.keep_gain(best if self._found.is_gain else {}, self._found.compared.ratio)
        for name in best if len(best) > 1 else ():
            if time.monotonic() < self._until:
                rate = self._try({key: value for key, value in best.items() if key != name})
                self._found.gained[name] = round(rate / statistics.median(rates), 4)


def _share_that_differs(job: JobConfig, options: Options, say: Say) -> float:
    """Return the share of rows whose greedy answer changes with ``options``, over the first rows of the job."""
    sampling = {name: value for name, value in job.sampling.params().items() if name not in _DRAWN}
    limit = min(_ROWS_COMPARED, job.input.limit or _ROWS_COMPARED)
    greedy = job.as_part(
        input={"limit": limit},
        sampling=SamplingTable(**{**sampling, "temperature": 0.0}),
        output=OutputTable(dir=str(trials_folder(job, TUNE))),
        scoring=ScoringTable(),
    )
    folders = []
    for name, chosen in (("answers-default", {}), ("answers-tuned", options)):
        say(f"comparing answers: {words(chosen)}")
        each = with_options(greedy, chosen).with_keys(name=name)
        tried(each, None, StartOptions(command="tune", quiet=True, fresh=True))
        folders.append(each.folder)
    found = compare(folders).answers["answers-tuned"]
    changed = found.differ + found.failed_before + found.failed_after
    return changed / max(1, changed + found.equal)


def _tried(job: JobConfig, options: Options, at_once: int, trial: Trial) -> Tried:
    status = f"{OOM}: {trial.reason}" if trial.status == OOM else trial.status
    if (found := trial.figures) is None:
        return Tried(dict(options), status, round(trial.seconds, 3), is_short=trial.is_short)
    rate, low, high = (float(f"{rate:.6g}") for rate in (found.rows_per_s, *found.interval))
    line = line_of(at_once, trial)
    limit = bottleneck_of([line], line, with_images=bool(job.prompt.images))
    running = None if trial.idle is None else round(trial.idle.running / engines_of(job))
    seconds = round(trial.seconds, 3)
    return Tried(dict(options), status, seconds, rate, low, high, *limit, running, trial.is_short)


def _cells(tried: Tried) -> Sequence[str]:
    interval = "" if tried.low is None else f"{number(tried.low)} to {number(tried.high)}"
    status = tried.status.partition(":")[0]
    return [
        words(tried.options),
        status,
        number(tried.rows_per_s),
        interval,
        f"{tried.seconds:.1f} s",
    ]
