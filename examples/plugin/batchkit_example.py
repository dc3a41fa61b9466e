"""One plug-in of each kind, for the job in ``job.toml``."""

from collections import deque

from batchkit import Run
from batchkit.engines.base import EngineLoad, RenderedPrompt
from batchkit.execution.engine_layer import EngineLayer
from batchkit.sources.files import open_input
from batchkit.sources.reader import Format
from batchkit.types import Choice, Completion, Usage


def read(path, table, skip, index):
    """A row for each paragraph; None for each that ``skip`` skips."""
    with open_input(path) as file:
        for number, text in enumerate(file.read().decode().split("\n\n"), start=index):
            yield None if skip(number) else {"text": text.strip()}


PARAGRAPHS = Format(read, suffixes=(".paragraphs",))


class Loud:
    """Answers each prompt with itself, in capitals."""

    max_num_seqs = 64
    limits = {"max_num_seqs": 64}
    versions = {"loud": "1.0"}

    def __init__(self):
        self.requests = deque()

    def submit(self, request):
        self.requests.append(request)

    def poll(self, timeout_s):
        done = []
        while self.requests:
            request = self.requests.popleft()
            words = request.messages[-1]["content"]
            count = len(words.split())
            done.append(Completion(request, [Choice(words.upper(), "stop")], Usage(count, count)))
        return done

    def abort(self, requests):
        """Stop answering these requests. This engine has already answered all of them."""

    def load(self):
        return EngineLoad(len(self.requests), 0, 0.0, 0)

    def close(self):
        self.requests.clear()


class LoudPreflight:
    def render(self, request):
        return RenderedPrompt(request.messages[-1]["content"], None)


def open_engine(job):
    return Loud()


def open_preflight(job):
    return LoudPreflight()


class KnownAnswers(EngineLayer):
    """Answers rows whose answer is known, without the engine."""

    def __init__(self, below, *, answers: dict[str, str]):
        super().__init__(below)
        self.answers, self.ready = answers, []

    def submit(self, request):
        text = self.answers.get(request.row.id)
        if text is None:
            super().submit(request)
        else:
            self.ready.append(Completion(request, [Choice(text, "stop")], Usage(0, 0)))

    def poll(self, timeout_s):
        ready, self.ready = self.ready, []
        return [*ready, *super().poll(0 if ready else timeout_s)]


def first_word(text):
    """The prediction in an answer; None if there is none."""
    return text.split()[0] if text.strip() else None


def as_long(prediction, reference, table, *, slack: int = 0):
    """From 0 to 1; None: not scored. ``reference`` is None if the row has none.

    ``slack``: difference in characters that is ignored.
    """
    if reference is None:
        return None
    shorter, longer = sorted([len(prediction), len(reference)])
    return shorter / longer if longer - shorter > slack else 1.0


class OfLongest:
    """Compares all answers with each other, so it runs when all rows have finished."""

    scores = ("of-longest",)

    def fields(job):
        """The fields of a row that this scorer reads, besides the reference."""
        return set()

    def score(job, answers, say):
        """Scores by the index of an answer, then by name."""
        longest = max(len(answer.text) for answer in answers)
        say(f"the longest of {len(answers)} answers has {longest} characters")
        return {answer.index: {"of-longest": len(answer.text) / longest} for answer in answers}


def write_texts(folder, path):
    """Write the text of each answer.

    Returns the number of rows in each file that it wrote.
    """
    texts = [record["text"] for record in Run(folder).rows() if record["status"] == "ok"]
    path.write_text("\n".join(texts))
    return {path: len(texts)}
