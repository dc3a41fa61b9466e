"""Charts that a model wrote as code: what is run, what is read from them, what equals the reference."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from batchkit.contrib.realhit.chart import Chart, ChartScore, same_values, score_chart, score_charts
from batchkit.contrib.realhit.chart.answer import Mode, chart_code
from batchkit.contrib.realhit.chart.sandbox import Sandbox
from tests.support.realhit import vectors

pd = pytest.importorskip("pandas")
pytest.importorskip("matplotlib")
pytest.importorskip("openpyxl")

Score = Callable[..., ChartScore]
IMPORTS = "import pandas as pd\nimport matplotlib.pyplot as plt\n"


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tables") / "labor-table01.xlsx"
    pd.DataFrame({"year": [2001, 2002], "men": [1.5, 2.5], "women": [3, 4]}).to_excel(
        path, index=False
    )
    return path


@pytest.fixture(scope="module")
def score() -> Iterator[Score]:
    with closing(Sandbox()) as sandbox:

        def score_one(
            response: str,
            reference: str = "[1, 2]",
            chart_type: str = "BarChart",
            mode: Mode = "fixed",
            table: Path | None = None,
        ) -> ChartScore:
            return score_chart(Chart(response, chart_type, reference, table), sandbox, mode)

        yield score_one


def drawn(body: str) -> str:
    return f"{IMPORTS}{body}plt.show()\n"


# What the official code was seen to answer. Its Pass "None" (no y values) is a chart not passed.


@pytest.mark.slow
@pytest.mark.parametrize("vector", vectors("chart_exec"))
def test_official_mode_gives_the_official_score_and_fixed_mode_passes_what_it_passes(
    score: Score, vector: dict[str, Any]
) -> None:
    official, fixed = (
        score(vector["response"], vector["reference"], vector["chart_type"], mode)
        for mode in ("official", "fixed")
    )
    wanted, has_passed = vector["result"], vector["result"]["Pass"] is True
    assert (official.ecr, official.passed, official.y) == (wanted["ECR"], has_passed, wanted["y"])
    assert fixed.ecr >= wanted["ECR"]
    assert bool(fixed.passed) >= has_passed


@pytest.mark.parametrize("mode", ["official", "fixed"])
@pytest.mark.parametrize("vector", vectors("chart_compare"))
def test_values_are_compared_as_the_official_code_does(vector: dict[str, Any], mode: Mode) -> None:
    chart_type = "PieChart" if vector["kind"] == "pie" else "BarChart"
    reference, prediction = (
        [math.nan if value == "NaN" else value for value in vector[name]]
        for name in ("reference", "prediction")
    )
    assert same_values(chart_type, reference, prediction, mode) == vector["pass"]


# Our own: what each mode runs and reads.


def test_a_chart_that_ran_and_equals_the_reference(score: Score) -> None:
    found = score(drawn("plt.bar(['a', 'b'], [1.004, 2])\n"))
    assert found == ChartScore(ecr=True, passed=True, y="[1.004, 2.0]", problem=None)


@pytest.mark.parametrize("mode", ["official", "fixed"])
@pytest.mark.parametrize(
    ("chart_type", "body", "reference"),
    [
        ("LineChart", "plt.plot([1, 2], [3, 4])\n", "[[3, 4]]"),
        ("LineChart", "pd.DataFrame({'a': [1, 2], 'b': [3, 4]}).plot()\n", "[[1, 2], [3, 4]]"),
        ("BarChart", "pd.DataFrame({'v': [1.5, 2.5]}).plot(kind='bar')\n", "[1.5, 2.5]"),
        ("BarChart", "plt.bar(['b', 'a'], [2, 1])\n", "[1, 2]"),
        ("ScatterChart", "plt.scatter([1, 2], [5, 6])\n", "[[5, 6]]"),
        ("PieChart", "plt.pie([1, 3])\n", "[0.25, 0.75]"),
        ("PieChart", "plt.pie([2668, 56423])\n", "[2668, 56423]"),
    ],
)
def test_each_type_of_chart_is_read(
    score: Score, mode: Mode, chart_type: str, body: str, reference: str
) -> None:
    found = score(drawn(body), reference, chart_type, mode)
    assert (found.ecr, found.passed, found.problem) == (True, True, None)


@pytest.mark.parametrize("mode", ["official", "fixed"])
@pytest.mark.parametrize(
    ("body", "reference"),
    [
        ("plt.plot([1, 2], [1, 2])\n", "[[1, 2], [3, 4]]"),
        ("plt.plot([1, 2], [1, 2])\nplt.plot([1, 2], [3, 4])\n", "[[1, 2]]"),
        ("plt.plot([1, 2], [1, 2.1])\n", "[[1, 2]]"),
        ("pass\n", "[[1, 2]]"),
    ],
)
def test_other_values_do_not_pass(score: Score, mode: Mode, body: str, reference: str) -> None:
    found = score(drawn(body), reference, "LineChart", mode)
    assert (found.ecr, found.passed) == (True, False)
    assert found.problem is not None


TWINX = "fig, ax = plt.subplots()\nax.plot([1], [1])\nax.twinx().plot([1], [3])\n"
SELECTED = "df = pd.DataFrame({'v': [1, 2]})\nplt.bar([0, 1], [df['v'][i] for i in range(2)])\n"
FRACTIONS = "plt.pie([603, 23, 374])\n"  # rounded, they sum to 0.99; divided by that, 0.6 is 0.61


OFFICIAL_ERRS: dict[str, tuple[str, str, str, bool]] = {  # …, and if the official code runs it
    "loop": ("BarChart", drawn("for k in (1, 2):\n    plt.bar([k], [k])\n"), "[1, 2]", False),
    "comprehension": ("BarChart", drawn(SELECTED), "[1, 2]", False),
    "no show": ("BarChart", f"```python\n{IMPORTS}plt.bar([1, 2], [1, 2])\n```", "[1, 2]", False),
    "print": ("BarChart", drawn("plt.bar([1, 2], [1, 2])\nprint('done')\n"), "[1, 2]", True),
    "barh": ("BarChart", drawn("plt.barh(['a', 'b'], [1, 2])\n"), "[1, 2]", True),
    "nan": ("BarChart", drawn("plt.bar([1, 2], [1, float('nan')])\n"), "[nan, 1]", True),
    "twinx": ("LineChart", drawn(TWINX), "[[1], [3]]", True),
    "close": ("LineChart", drawn("plt.plot([1], [1])\nplt.close()\n"), "[[1]]", True),
    "markers": ("ScatterChart", drawn("plt.plot([1, 2], [3, 4], 'o')\n"), "[[3, 4]]", True),
    "rounded fractions": ("PieChart", drawn(FRACTIONS), "[0.6, 0.02, 0.37]", True),
}


@pytest.mark.parametrize("case", OFFICIAL_ERRS)
def test_fixed_mode_reads_what_the_official_runner_gets_wrong(score: Score, case: str) -> None:
    chart_type, response, reference, official_ecr = OFFICIAL_ERRS[case]
    official = score(response, reference, chart_type, "official")
    fixed = score(response, reference, chart_type, "fixed")
    assert (official.ecr, bool(official.passed)) == (official_ecr, False)
    assert (fixed.ecr, fixed.passed, fixed.problem) == (True, True, None)


@pytest.mark.parametrize("mode", ["official", "fixed"])
@pytest.mark.parametrize("reference", ["", "  ", "not a list", "[1, ", "7"])
def test_chart_without_a_usable_reference_is_unscored_but_run(
    score: Score, mode: Mode, reference: str
) -> None:
    found = score(drawn("plt.bar([1, 2], [1, 2])\n"), reference, mode=mode)
    assert (found.ecr, found.passed) == (True, None)
    assert found.y in ("[1, 2]", "[1.0, 2.0]")


@pytest.mark.parametrize(
    ("name", "mode", "passed"),
    [
        ("'table.xlsx'", "fixed", True),
        ('"table.xlsx"', "fixed", True),
        ("'./data/labor-table01.xlsx'", "fixed", True),
        ("r'C:\\x\\other.xlsx'", "fixed", True),
        ("'any.xlsx'", "official", True),
        ('"table.xlsx"', "official", True),
        ('"any.xlsx"', "official", False),  # it knows one name in double quotes
    ],
)
def test_table_is_read_by_whatever_name_the_code_has_for_it(
    score: Score, table: Path, name: str, mode: Mode, passed: bool
) -> None:
    code = drawn(f"df = pd.read_excel({name})\nplt.bar(df['year'], df['men'])\n")
    found = score(code, "[1.5, 2.5]", mode=mode, table=table)
    assert (found.passed, found.problem is None) == (passed, passed)


def test_missing_table_is_named(score: Score, tmp_path: Path) -> None:
    code = drawn("df = pd.read_excel('table.xlsx')\nplt.bar([1], [1])\n")
    found = score(code, "[1]", table=tmp_path / "labor-table77.xlsx")
    assert (found.ecr, found.passed) == (False, False)
    assert found.problem == "table labor-table77.xlsx is missing"


@pytest.mark.parametrize("mode", ["official", "fixed"])
@pytest.mark.parametrize("response", ["", "[ERROR] OOM: Image too large", "I can't draw that."])
def test_answer_without_code_did_not_run(score: Score, mode: Mode, response: str) -> None:
    assert chart_code(response, mode) is None
    found = score(response, mode=mode)
    assert found == ChartScore(False, False, "", "there is no code in the answer")


@pytest.mark.parametrize("mode", ["official", "fixed"])
@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("plt.bar([1], [missing])\n", "NameError: name 'missing' is not defined"),
        ("import no_such_package\n", "ModuleNotFoundError: No module named 'no_such_package'"),
        ("raise ValueError('two\\nlines')\n", "ValueError: two lines"),
    ],
)
def test_problem_is_the_error_in_one_line(
    score: Score, mode: Mode, body: str, problem: str
) -> None:
    found = score(drawn(body), mode=mode)
    assert found == ChartScore(False, False, "", problem)


def test_scores_come_in_order_and_as_the_charts_are_asked_for() -> None:
    taken = 0

    def charts() -> Iterator[Chart]:
        nonlocal taken
        for number in range(20):
            taken += 1
            code = drawn(f"plt.bar([1], [{number}])\n")
            yield Chart(code, "BarChart", f"[{number}]", None)

    scores = score_charts(charts(), mode="fixed", workers=2)
    assert taken == 0
    first = [next(scores) for _ in range(3)]
    assert taken < 12
    found = [*first, *scores]
    assert [chart.y for chart in found] == [f"[{number}.0]" for number in range(20)]


# Code as models write it, and as the data set has it.


def test_fixed_mode_finds_code_in_an_answer() -> None:
    code = "import matplotlib.pyplot as plt\nplt.bar([1], [2])"
    for response in (
        f"Here:\n```python\n{code}\n```\nDone.",
        f"Here:\n```py\nimport os\n```\nthen\n```\n{code}\n```",
        f"Sure!\n\n{code}\nplt.show()\n\nThis draws it.",
        f"Sure!\n\n{code}",
        f"[Final Answer]: {code}\nplt.show()",
        f"```python\n{code}",
        f"[Final Answer]: ```python\n{code}\n```",
        f"```python\n{code}\n```\nTo see it, call\n```python\nplt.show()\n```",
        f"I read it from the table.\n\n{code}",
        textwrap.indent(f"```python\n{code}\n```", "  "),
    ):
        found = chart_code(response, "fixed")
        assert found is not None
        assert textwrap.dedent(found).strip().removesuffix("\nplt.show()") == code


@pytest.mark.parametrize("repeated", [":~~~", "```a", "~~~ ", "```\n", "`", ": ", "a"])
def test_an_answer_that_repeats_itself_takes_no_longer_than_its_length(repeated: str) -> None:
    """Of a million characters; in quadratic time, each would take hours."""
    answer = "```" + repeated * (1_000_000 // len(repeated)) + "`"
    assert chart_code(answer, "fixed") is None


@pytest.mark.parametrize(
    "code",
    [
        "import pandas as pd \n import matplotlib.pyplot as plt \n for k in (1, 2): \n \t plt.bar([k], [k]) \n plt.show()",
        "import pandas as pd\nimport matplotlib.pyplot as plt\nplt.bar([‘a’, “b”], [1, 2])\nplt.show()",
        "import pandas as pd\r\nimport matplotlib.pyplot as plt\r\nfor\u00a0k in (1, 2):\r\n\u00a0   plt.bar([k], [k])\r\nplt.show()",
        "import pandas as pd\nimport matplotlib.pyplot as plt\n\tplt.bar([1, 2], [1, 2])\n\tplt.show()",
    ],
    ids=["stray space", "curly quotes", "hard spaces", "indented tail"],
)
def test_fixed_mode_corrects_what_was_lost_on_the_way(score: Score, code: str) -> None:
    found = score(code)
    assert (found.passed, found.problem) == (True, None)


def test_indentation_that_is_meant_is_kept(score: Score) -> None:
    body = "def draw(values):\n  for k, value in enumerate(values):\n    plt.bar([k], [value])\n"
    assert score(drawn(f"{body}draw([1, 2])\n")).passed


@pytest.mark.parametrize(
    "body",
    [
        "plt.style.use('ggplot')\nplt.bar([1, 2], [1, 2])\nplt.tight_layout()\nplt.savefig('a.png')\n",
        "plt.rcParams['font.family'] = 'SimHei'\nplt.bar([1, 2], [1, 2])\nplt.savefig('a.pdf')\n",
        "import tempfile\ntempfile.TemporaryFile\nplt.bar([1, 2], [1, 2])\nopen('notes', 'w').write('x')\n",
        "pd.DataFrame({'v': [1, 2]}).to_csv('v.csv')\nplt.bar([1, 2], pd.read_csv('v.csv')['v'])\n",
        "import statistics, datetime, zoneinfo\nplt.bar([1, 2], [1, 2])\nzoneinfo.ZoneInfo('Europe/Berlin')\n",
        "import threading\nthread = threading.Thread(target=plt.bar, args=([1, 2], [1, 2]))\nthread.start()\nthread.join()\n",
    ],
    ids=["style", "fonts", "file", "csv", "imports", "thread"],
)
def test_what_honest_charts_do_is_allowed(score: Score, body: str) -> None:
    found = score(drawn(body))
    assert (found.passed, found.problem) == (True, None)
