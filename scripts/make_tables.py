"""Draw eight tables and write forty questions about them: jobs/data/tables, RealHiTBench's layout.

    python scripts/make_tables.py [FOLDER]

All numbers are made up. Totals and answers are computed from the tables below, so they agree.
"""

from __future__ import annotations

import csv
import html
import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

FOLDER = Path(__file__).parents[1] / "jobs" / "data" / "tables"


@dataclass(frozen=True)
class Table:
    """A table whose rows and columns are named by paths: ``North/Bread``, ``First half/Q1``."""

    name: str
    structure: str  # RealHiTBench's CompStrucCata
    title: str
    row_heads: Sequence[str]
    columns: Sequence[str]
    rows: Mapping[str, Sequence[float]]

    def __getitem__(self, cell: tuple[str, str]) -> float:
        row, column = cell
        return self.rows[row][self.columns.index(column)]

    def column(self, column: str, rows: Sequence[str] | None = None) -> list[float]:
        return [self[row, column] for row in (self.rows if rows is None else rows)]

    def under(self, group: str) -> list[str]:
        """The rows of a group, its subtotal left out."""
        return [
            r for r in self.rows if r.startswith(f"{group}/") and not r.endswith(("Total", "All"))
        ]

    def row_values(self, row: str, group: str = "") -> list[float]:
        """A row's values in the columns of a group (all of them, totals too, when it is empty)."""
        return [v for c, v in zip(self.columns, self.rows[row], strict=True) if c.startswith(group)]


def with_total_column(table: Table, name: str) -> Table:
    rows = {row: [*values, sum(values)] for row, values in table.rows.items()}
    return replace(table, columns=[*table.columns, name], rows=rows)


def with_total_rows(table: Table, subtotal: str | None, total: str) -> Table:
    """A subtotal at the end of each row group (if it has a name), and one row for everything."""
    rows: dict[str, Sequence[float]] = {}
    for group, members in groupby(table.rows, key=lambda row: row.split("/")[0]):
        names = list(members)
        rows |= {name: table.rows[name] for name in names}
        if subtotal:
            rows[f"{group}/{subtotal}"] = _sums([table.rows[name] for name in names])
    rows[total] = _sums(list(table.rows.values()))
    return replace(table, rows=rows)


def _sums(rows: Sequence[Sequence[float]]) -> list[float]:
    return [round(sum(values), 2) for values in zip(*rows, strict=True)]


def tables() -> dict[str, Table]:
    """All tables by their file name."""
    bakery = Table(
        name="food-table01",
        structure="ColumnHeaderMerge",
        title="Hedgerow Bakery: items sold in 2025, in hundreds",
        row_heads=["Region", "Product"],
        columns=["First half/Q1", "First half/Q2", "Second half/Q3", "Second half/Q4"],
        rows={
            "North/Bread": [412, 398, 430, 455],
            "North/Cakes": [120, 135, 128, 210],
            "North/Pastries": [96, 104, 117, 140],
            "South/Bread": [388, 402, 415, 421],
            "South/Cakes": [143, 150, 162, 198],
            "South/Pastries": [88, 91, 109, 133],
            "Harbour/Bread": [205, 260, 312, 214],
            "Harbour/Cakes": [64, 92, 131, 77],
            "Harbour/Pastries": [71, 118, 164, 83],
        },
    )
    library = Table(
        name="society-table02",
        structure="ColumnHeaderMerge",
        title="Loans of the town libraries, March 2025",
        row_heads=["Branch", "Day type"],
        columns=[
            *("Adults/Books", "Adults/Audio", "Adults/Games"),
            *("Children/Books", "Children/Audio", "Children/Games"),
        ],
        rows={
            "Central/Weekday": [1840, 312, 95, 1265, 188, 240],
            "Central/Saturday": [730, 141, 66, 812, 97, 205],
            "Riverside/Weekday": [905, 120, 41, 744, 85, 133],
            "Riverside/Saturday": [388, 57, 29, 465, 52, 118],
            "Hillside/Weekday": [512, 64, 18, 390, 31, 57],
            "Hillside/Saturday": [201, 22, 15, 244, 19, 48],
        },
    )
    bus = Table(
        name="transport-table03",
        structure="MultiColumnClassified",
        title="School bus riders per day, by route and term",
        row_heads=["Area", "Route"],
        columns=[
            *("Autumn/Morning", "Autumn/Afternoon"),
            *("Spring/Morning", "Spring/Afternoon"),
            *("Summer/Morning", "Summer/Afternoon"),
        ],
        rows={
            "East/Route 1": [46, 41, 44, 39, 37, 30],
            "East/Route 2": [52, 50, 55, 49, 43, 38],
            "East/Route 3": [28, 31, 30, 33, 22, 25],
            "West/Route 4": [61, 54, 58, 52, 49, 40],
            "West/Route 5": [19, 17, 21, 18, 15, 12],
            "West/Route 6": [34, 36, 33, 35, 27, 29],
        },
    )
    birds = Table(
        name="environment-table04",
        structure="MultiColumnClassified",
        title="Birds counted at Mill Marsh",
        row_heads=["Habitat", "Species"],
        columns=[f"{year}/{season}" for year in (2022, 2023, 2024) for season in ("May", "Oct")],
        rows={
            "Wetland/Lapwing": [84, 132, 79, 128, 75, 121],
            "Wetland/Teal": [41, 260, 45, 274, 48, 291],
            "Wetland/Curlew": [22, 37, 20, 33, 19, 30],
            "Woodland/Blackcap": [58, 6, 61, 8, 66, 9],
            "Woodland/Nuthatch": [33, 35, 31, 36, 34, 38],
            "Farmland/Skylark": [47, 29, 45, 27, 44, 310],
            "Farmland/Linnet": [64, 88, 60, 91, 62, 86],
        },
    )
    energy = Table(
        name="economy-table05",
        structure="ColumnHeaderMerge",
        title="Community hall: energy used and paid for in 2025",
        row_heads=["Season", "Month"],
        columns=[
            *("Electricity/kWh", "Electricity/Cost"),
            *("Gas/kWh", "Gas/Cost"),
            "Mean outdoor temperature (°C)",
        ],
        rows={
            "Winter/January": [1240, 310, 4100, 328, 2.1],
            "Winter/February": [1150, 287.5, 3720, 297.6, 3.4],
            "Spring/April": [910, 227.5, 1860, 148.8, 9.2],
            "Spring/May": [840, 210, 940, 75.2, 13.5],
            "Summer/July": [760, 190, 210, 16.8, 18.9],
            "Summer/August": [790, 197.5, 240, 19.2, 18.2],
            "Autumn/October": [980, 245, 1730, 138.4, 10.8],
            "Autumn/November": [1090, 272.5, 2890, 231.2, 6.0],
        },
    )
    ferry = Table(
        name="transport-table06",
        structure="ColumnHeaderMerge",
        title="Island ferries: passengers and vehicles in July 2025",
        row_heads=["Line", "Sailing"],
        columns=[
            *("Foot passengers/Adults", "Foot passengers/Children"),
            *("Vehicles/Bicycles", "Vehicles/Cars", "Vehicles/Vans"),
        ],
        rows={
            "Long Island/Day": [6420, 2115, 1480, 2260, 310],
            "Long Island/Night": [1130, 204, 96, 705, 188],
            "Gull Rock/Day": [3875, 1690, 1225, 640, 72],
            "Gull Rock/Evening": [1460, 388, 410, 215, 20],
            "Saint Olan/Day": [2940, 1022, 860, 1105, 264],
            "Saint Olan/Night": [415, 61, 28, 290, 143],
        },
    )
    garden = Table(
        name="agriculture-table07",
        structure="SingleRowClassified",
        title="Allotment harvest by bed and crop, in kilograms",
        row_heads=["Bed", "Crop"],
        columns=["Area (m²)", *(f"Harvest/{year}" for year in range(2021, 2026))],
        rows={
            "Bed A/Potatoes": [24, 61, 64, 66, 70, 73],
            "Bed A/Onions": [10, 22, 21, 24, 23, 25],
            "Bed B/Tomatoes": [12, 48, 39, 52, 35, 57],
            "Bed B/Beans": [8, 15, 16, 15, 17, 16],
            "Bed C/Kale": [6, 18, 17, 15, 14, 12],
            "Bed C/Squash": [14, 40, 44, 47, 52, 55],
        },
    )
    clinic = Table(
        name="health-table08",
        structure="ContentCompound",
        title="Village clinic: visits in one week, by reason and age",
        row_heads=["Day", "Session"],
        columns=[
            *("Check-up/Under 18", "Check-up/18 and over"),
            *("Injury/Under 18", "Injury/18 and over"),
            *("Vaccination/Under 18", "Vaccination/18 and over"),
        ],
        rows={
            "Monday/Morning": [9, 17, 4, 6, 12, 8],
            "Monday/Afternoon": [11, 13, 7, 5, 10, 6],
            "Wednesday/Morning": [8, 19, 3, 4, 15, 11],
            "Wednesday/Afternoon": [12, 14, 9, 7, 9, 5],
            "Friday/Morning": [7, 21, 5, 8, 14, 16],
            "Friday/Afternoon": [10, 12, 8, 10, 7, 4],
        },
    )
    every = [
        with_total_rows(with_total_column(bakery, "Year"), "All", "All regions"),
        with_total_rows(with_total_column(library, "All loans"), "Total", "All branches"),
        with_total_rows(bus, None, "All routes"),
        birds,
        energy,
        with_total_rows(ferry, None, "All lines"),
        garden,
        with_total_rows(with_total_column(clinic, "All visits"), None, "Whole week"),
    ]
    return {table.name: table for table in every}


@dataclass(frozen=True)
class Question:
    """``values`` are the heights that a chart must show; only Visualization has them."""

    table: Table
    subtype: str
    text: str
    answer: str
    values: Sequence[float] | None = None


# ---- questions --------------------------------------------------------------------------------

TYPES = {
    "Value-Matching": "Fact Checking",
    "Inference-based Fact Checking": "Fact Checking",
    "Multi-hop Fact Checking": "Fact Checking",
    "Calculation": "Numerical Reasoning",
    "Comparison": "Numerical Reasoning",
    "Counting": "Numerical Reasoning",
    "Ranking": "Numerical Reasoning",
    "Multi-hop Numerical Reasoning": "Numerical Reasoning",
    "Structure Comprehending": "Structure Comprehending",
    "Summary Analysis": "Data Analysis",
    "Rudimentary Analysis": "Data Analysis",
    "Exploratory Analysis": "Data Analysis",
    "Predictive Analysis": "Data Analysis",
    "Anomaly Analysis": "Data Analysis",
    "LineChart Generation": "Visualization",
    "BarChart Generation": "Visualization",
    "PieChart Generation": "Visualization",
    "ScatterChart Generation": "Visualization",
}


def questions() -> Iterator[Question]:
    """Five a table, with the answers computed from its cells."""
    for table, ask in zip(
        tables().values(),
        (_bakery, _library, _bus, _birds, _energy, _ferry, _garden, _clinic),
        strict=True,
    ):
        yield from ask(table)


def _bakery(t: Table) -> Iterator[Question]:
    yield Question(
        t,
        "Value-Matching",
        "How many hundreds of cakes were sold in the South region in Q4?",
        number(t["South/Cakes", "Second half/Q4"]),
    )
    harbour = {c: t["Harbour/Pastries", c] for c in t.columns[:4]}
    yield Question(
        t,
        "Inference-based Fact Checking",
        "In which quarter did the Harbour region sell the most pastries?",
        leaf(max(harbour, key=harbour.__getitem__)),
    )
    halves = [sum(t.row_values("All regions", half)) for half in ("First half", "Second half")]
    yield Question(
        t,
        "Calculation",
        "By how many hundreds did the sales of all regions in the second half exceed those in"
        " the first half?",
        number(halves[1] - halves[0]),
    )
    regions = ["North", "South", "Harbour"]
    yield Question(
        t,
        "Ranking",
        "Rank the regions by their sales of all products over the year, from highest to lowest.",
        ", ".join(sorted(regions, key=lambda r: -t[f"{r}/All", "Year"])),
    )
    bread = [t[f"{region}/Bread", "Year"] for region in regions]
    yield _bar(t, "the year's bread sales by region", regions, bread)


def _library(t: Table) -> Iterator[Question]:
    saturdays, weekdays = (
        sum(t.column("Children/Games", [r for r in t.rows if r.endswith(day)]))
        for day in ("Saturday", "Weekday")
    )
    yield Question(
        t,
        "Multi-hop Fact Checking",
        "Did children borrow more games on Saturdays than on weekdays, all branches together?",
        yes(saturdays > weekdays),
    )
    yield Question(
        t,
        "Value-Matching",
        "How many audio loans did adults make at Riverside on weekdays?",
        number(t["Riverside/Weekday", "Adults/Audio"]),
    )
    share = 100 * t["Central/Total", "All loans"] / t["All branches", "All loans"]
    yield Question(
        t,
        "Multi-hop Numerical Reasoning",
        "What percentage of all loans was made at the Central branch? Give two decimals.",
        f"{share:.2f}",
    )
    yield Question(
        t,
        "Structure Comprehending",
        "Which kinds of media are listed under the header Children?",
        ", ".join(leaf(c) for c in t.columns if c.startswith("Children/")),
    )
    books = t["All branches", "Adults/Books"] + t["All branches", "Children/Books"]
    share = 100 * books / t["All branches", "All loans"]
    yield Question(
        t,
        "Summary Analysis",
        "Give a one-line summary of what the table shows.",
        "Loans of books, audio and games to adults and children at three library branches on"
        f" weekdays and Saturdays; books make up {share:.0f}% of all loans and Central is the"
        " busiest branch.",
    )


def _bus(t: Table) -> Iterator[Question]:
    routes = [row for row in t.rows if "/" in row]
    busier = [r for r in routes if t[r, "Autumn/Afternoon"] > t[r, "Autumn/Morning"]]
    yield Question(
        t,
        "Inference-based Fact Checking",
        "Which routes carry more riders in the afternoon than in the morning in the autumn term?",
        ", ".join(map(leaf, busier)),
    )
    yield Question(
        t,
        "Counting",
        "How many routes carry at least 40 riders on summer mornings?",
        number(sum(v >= 40 for v in t.column("Summer/Morning", routes))),
    )
    areas = {a: sum(t.column("Spring/Morning", t.under(a))) for a in ("East", "West")}
    yield Question(
        t,
        "Comparison",
        "Which area has more riders on spring mornings, East or West, and by how many?",
        f"{max(areas, key=areas.__getitem__)}, {number(abs(areas['East'] - areas['West']))}",
    )
    yield Question(
        t,
        "Structure Comprehending",
        "Which routes belong to the area West?",
        ", ".join(map(leaf, t.under("West"))),
    )
    yield Question(
        t,
        "Rudimentary Analysis",
        "What is the average number of riders per route on autumn mornings? Give two decimals.",
        f"{statistics.mean(t.column('Autumn/Morning', routes)):.2f}",
    )


def _birds(t: Table) -> Iterator[Question]:
    yield Question(
        t,
        "Value-Matching",
        "How many teal were counted in October 2023?",
        number(t["Wetland/Teal", "2023/Oct"]),
    )
    mays = [c for c in t.columns if c.endswith("May")]
    rising = [r for r in t.rows if is_sorted([t[r, c] for c in mays])]
    yield Question(
        t,
        "Inference-based Fact Checking",
        "Which species were counted in larger numbers every May than in the May before?",
        ", ".join(map(leaf, rising)),
    )
    wetland = sum(t.column("2022/Oct", t.under("Wetland")))
    yield Question(
        t, "Calculation", "How many wetland birds were counted in October 2022?", number(wetland)
    )
    skylark = [number(v) for v in t.row_values("Farmland/Skylark") if v < 100]
    yield Question(
        t,
        "Anomaly Analysis",
        "Is there a count in the table that looks like an error? Name it and say why.",
        f"Skylark in October 2024: {number(t['Farmland/Skylark', '2024/Oct'])}, more than ten times"
        f" as many as in the Octobers before; all its other counts lie between {min(skylark)}"
        f" and {max(skylark)}.",
    )
    yield _line(
        t,
        "the number of curlews over all six counts",
        [c.replace("/", " ") for c in t.columns],
        t.row_values("Wetland/Curlew"),
    )


def _energy(t: Table) -> Iterator[Question]:
    warmer = "Mean outdoor temperature (°C)"
    r = statistics.correlation(t.column(warmer), t.column("Gas/kWh"))
    yield Question(
        t,
        "Exploratory Analysis",
        "How does the gas used correlate with the mean outdoor temperature? Give the relation and"
        " the coefficient to two decimals.",
        f"{relation(r)}, {r:.2f}",
    )
    price = t["Winter/January", "Electricity/Cost"] / t["Winter/January", "Electricity/kWh"]
    yield Question(
        t,
        "Calculation",
        "What was the price of one kWh of electricity in January? Give two decimals.",
        f"{price:.2f}",
    )
    dearer = [row for row in t.rows if t[row, "Gas/Cost"] > t[row, "Electricity/Cost"]]
    yield Question(
        t,
        "Multi-hop Fact Checking",
        "In which months did gas cost more than electricity?",
        ", ".join(map(leaf, dearer)),
    )
    yield Question(
        t,
        "Structure Comprehending",
        "Which headers stand directly above values without a second header level?",
        ", ".join(c for c in t.columns if "/" not in c),
    )
    pairs = sorted(zip(t.column(warmer), t.column("Electricity/kWh"), strict=True))
    yield _chart(
        t,
        "Scatter",
        "Draw a scatter plot of the electricity used (kWh) against the mean outdoor temperature.",
        f"plt.scatter({[x for x, _ in pairs]}, {[y for _, y in pairs]})",
        [y for _, y in pairs],
    )


def _ferry(t: Table) -> Iterator[Question]:
    sailings = [row for row in t.rows if "/" in row]
    yield Question(
        t,
        "Value-Matching",
        "How many bicycles travelled on the evening sailings to Gull Rock?",
        number(t["Gull Rock/Evening", "Vehicles/Bicycles"]),
    )
    more = t["Gull Rock/Day", "Vehicles/Bicycles"] > t["Gull Rock/Day", "Vehicles/Cars"]
    yield Question(
        t,
        "Multi-hop Fact Checking",
        "Do the day sailings to Gull Rock carry more bicycles than cars?",
        yes(more),
    )
    olan = sum(sum(t.row_values(row, "Foot passengers")) for row in t.under("Saint Olan"))
    yield Question(
        t,
        "Multi-hop Numerical Reasoning",
        "How many foot passengers, adults and children, travelled on the Saint Olan line?",
        number(olan),
    )
    yield Question(
        t,
        "Ranking",
        "Rank all sailings by the vans they carried, from most to fewest. Write Line Sailing.",
        ", ".join(
            row.replace("/", " ") for row in sorted(sailings, key=lambda r: -t[r, "Vehicles/Vans"])
        ),
    )
    kinds = ["Vehicles/Bicycles", "Vehicles/Cars", "Vehicles/Vans"]
    yield _pie(
        t,
        "the bicycles, cars and vans of all lines",
        [leaf(kind) for kind in kinds],
        [t["All lines", kind] for kind in kinds],
    )


def _garden(t: Table) -> Iterator[Question]:
    yield Question(
        t,
        "Value-Matching",
        "How many kilograms of onions were harvested in 2023?",
        number(t["Bed A/Onions", "Harvest/2023"]),
    )
    yields = {row: t[row, "Harvest/2025"] / t[row, "Area (m²)"] for row in t.rows}
    best = max(yields, key=yields.__getitem__)
    yield Question(
        t,
        "Multi-hop Numerical Reasoning",
        "Which crop had the highest harvest per square metre in 2025, and how much was it? Give"
        " two decimals.",
        f"{leaf(best)}, {yields[best]:.2f}",
    )
    squash = t.row_values("Bed C/Squash", "Harvest")
    assert is_sorted(squash)
    yield Question(
        t,
        "Predictive Analysis",
        "Judging by 2021 to 2025, what trend can be expected for the squash harvest in 2026?",
        "Increasing trend",
    )
    yield Question(
        t,
        "Structure Comprehending",
        "Which years are listed under the header Harvest?",
        ", ".join(leaf(c) for c in t.columns if "/" in c),
    )
    potatoes, kale = (t.row_values(r, "Harvest") for r in ("Bed A/Potatoes", "Bed C/Kale"))
    r = statistics.correlation(potatoes, kale)
    yield Question(
        t,
        "Exploratory Analysis",
        "How do the yearly harvests of potatoes and kale correlate? Give the relation and the"
        " coefficient to two decimals.",
        f"{relation(r)}, {r:.2f}",
    )


def _clinic(t: Table) -> Iterator[Question]:
    sessions = [row for row in t.rows if "/" in row]
    yield Question(
        t,
        "Inference-based Fact Checking",
        "Which session had the most visits in the week? Write Day Session.",
        max(sessions, key=lambda row: t[row, "All visits"]).replace("/", " "),
    )
    many = [r for r in sessions if t[r, "Injury/Under 18"] > t[r, "Injury/18 and over"]]
    yield Question(
        t,
        "Counting",
        "In how many sessions did more people under 18 than over come with an injury?",
        number(len(many)),
    )
    mean = statistics.mean(t.column("All visits", sessions))
    yield Question(
        t,
        "Rudimentary Analysis",
        "What is the average number of visits per session? Give two decimals.",
        f"{mean:.2f}",
    )
    yield Question(
        t,
        "Structure Comprehending",
        "How many columns stand under each reason for a visit, and what are they?",
        "2, Under 18, 18 and over",
    )
    reasons = {
        reason: sum(t.row_values("Whole week", reason))
        for reason in ("Check-up", "Injury", "Vaccination")
    }
    largest = max(reasons, key=reasons.__getitem__)
    yield Question(
        t,
        "Summary Analysis",
        "Summarise the week at the clinic in one line.",
        f"{number(t['Whole week', 'All visits'])} visits in six sessions on Monday, Wednesday"
        f" and Friday: "
        + ", ".join(f"{number(n)} for {reason.lower()}" for reason, n in reasons.items())
        + f"; {largest.lower()} is the most frequent reason.",
    )


def number(value: float) -> str:
    return str(int(value)) if value == int(value) else f"{value:.2f}"


def leaf(path: str) -> str:
    return path.rsplit("/", 1)[-1]


def yes(holds: bool) -> str:
    return "Yes" if holds else "No"


def is_sorted(values: Sequence[float]) -> bool:
    return all(a < b for a, b in pairwise(values))


def relation(r: float) -> str:
    """RealHiTBench's words: under 0.3 none, to 0.7 weak, above strong."""
    if abs(r) < 0.3:
        return "No correlation"
    return (
        f"{'Strong' if abs(r) >= 0.7 else 'Weak'} {'positive' if r > 0 else 'negative'} correlation"
    )


def _bar(table: Table, what: str, names: Sequence[str], values: Sequence[float]) -> Question:
    names, values = zip(*sorted(zip(names, values, strict=True)), strict=True)
    code = f"plt.bar({list(names)}, {list(values)})"
    return _chart(table, "Bar", f"Draw a bar chart of {what}.", code, values)


def _line(table: Table, what: str, names: Sequence[str], values: Sequence[float]) -> Question:
    code = f"plt.plot({list(names)}, {list(values)}, marker='o')"
    return _chart(table, "Line", f"Draw a line chart of {what}.", code, values)


def _pie(table: Table, what: str, names: Sequence[str], values: Sequence[float]) -> Question:
    code = f"plt.pie({list(values)}, labels={list(names)}, autopct='%1.1f%%')"
    return _chart(table, "Pie", f"Draw a pie chart of {what}.", code, values)


def _chart(table: Table, kind: str, text: str, code: str, values: Sequence[float]) -> Question:
    program = f"import matplotlib.pyplot as plt\n\n{code}\nplt.title({table.title!r})\nplt.show()"
    return Question(table, f"{kind}Chart Generation", text, program, values)


def record(index: int, question: Question) -> dict[str, object]:
    """One entry of QA_final.json, with RealHiTBench's keys."""
    processed = question.answer if question.values is None else str(list(question.values))
    return {
        "id": index,
        "FileName": question.table.name,
        "CompStrucCata": question.table.structure,
        "Source": "made up for batchkit",
        "Question": question.text,
        "QuestionType": TYPES[question.subtype],
        "SubQType": question.subtype,
        "COT": [
            {"planning": "First, find the rows and columns that the question names."},
            {"planning": "Then work out the answer from their cells."},
        ],
        "FinalAnswer": question.answer,
        "ProcessedAnswer": processed,
    }


# ---- files ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """A cell of the drawn grid, merged over ``height`` rows and ``width`` columns."""

    row: int
    column: int
    text: str
    head: bool
    height: int = 1
    width: int = 1


def cells(table: Table) -> list[Cell]:
    """The whole grid, row by row: merged headers above, merged row groups at the left."""
    levels, heads = _levels(table), len(table.row_heads)
    grid = [Cell(0, i, name, True, height=levels) for i, name in enumerate(table.row_heads)]
    grid += _merged(table.columns, levels, heads, across=True)
    grid += _merged(list(table.rows), heads, levels, across=False)
    for y, values in enumerate(table.rows.values(), start=levels):
        grid += [
            Cell(y, x, _shown(value, table.column(column)), False)
            for x, (column, value) in enumerate(zip(table.columns, values, strict=True), heads)
        ]
    return sorted(grid, key=lambda cell: (cell.row, cell.column))


def _levels(table: Table) -> int:
    return max(path.count("/") for path in table.columns) + 1


def _merged(paths: Sequence[str], levels: int, start: int, *, across: bool) -> list[Cell]:
    """Headers of one side: equal neighbours become one cell, a short path fills its last levels."""
    merged = []
    for level in range(levels):
        position = start
        for _, run in groupby(paths, key=lambda path: tuple(path.split("/")[: level + 1])):
            members = list(run)
            parts = members[0].split("/")
            if level < len(parts):
                depth = levels - level if level == len(parts) - 1 else 1
                merged.append(
                    Cell(level, position, parts[level], True, depth, len(members))
                    if across
                    else Cell(position, level, parts[level], True, len(members), depth)
                )
            position += len(members)
    return merged


def _shown(value: float, column: Sequence[float]) -> str:
    """With one decimal where any value of its column has one."""
    return f"{value:,.0f}" if all(v == int(v) for v in column) else f"{value:,.1f}"


def as_rows(table: Table) -> list[list[str]]:
    """The grid as a spreadsheet exports it: a merged cell's text in its first place."""
    width = len(table.row_heads) + len(table.columns)
    rows = [[""] * width for _ in range(_levels(table) + len(table.rows))]
    for cell in cells(table):
        rows[cell.row][cell.column] = cell.text.replace(",", "") if not cell.head else cell.text
    return rows


def as_markdown(table: Table) -> str:
    rows = as_rows(table)
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]]) + "\n"


def as_html(table: Table) -> str:
    lines = [
        "<!DOCTYPE html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>{html.escape(table.title)}</title></head>',
        f"<body><table>\n<caption>{html.escape(table.title)}</caption>",
    ]
    for _, row in groupby(cells(table), key=lambda cell: cell.row):
        shown = "".join(_html_cell(cell) for cell in row)
        lines.append(f"<tr>{shown}</tr>")
    return "\n".join([*lines, "</table></body></html>"]) + "\n"


def _html_cell(cell: Cell) -> str:
    tag = "th" if cell.head else "td"
    spans = f' rowspan="{cell.height}"' if cell.height > 1 else ""
    spans += f' colspan="{cell.width}"' if cell.width > 1 else ""
    return f"<{tag}{spans}>{html.escape(cell.text)}</{tag}>"


def as_latex(table: Table) -> str:
    width = len(table.row_heads) + len(table.columns)
    lines = ["\\begin{table}[]", f"\\caption{{{_tex(table.title)}}}"]
    lines.append(f"\\begin{{tabular}}{{{'l' * len(table.row_heads)}{'r' * len(table.columns)}}}")
    grid = {(cell.row, cell.column): cell for cell in cells(table)}
    for y in range(_levels(table) + len(table.rows)):
        parts, x = [], 0
        while x < width:
            cell = grid.get((y, x))
            parts.append(_latex_cell(cell) if cell else "")
            x += cell.width if cell else 1
        lines.append(" & ".join(parts) + " \\\\")
    return "\n".join([*lines, "\\end{tabular}", "\\end{table}"]) + "\n"


def _latex_cell(cell: Cell) -> str:
    text = _tex(cell.text)
    if cell.height > 1:
        text = f"\\multirow{{{cell.height}}}{{*}}{{{text}}}"
    return f"\\multicolumn{{{cell.width}}}{{c}}{{{text}}}" if cell.width > 1 else text


def _tex(text: str) -> str:
    return (
        text.replace("%", "\\%").replace("&", "\\&").replace("²", "$^2$").replace("°", "$^\\circ$")
    )


def draw(table: Table, size: int = 20) -> Image.Image:
    """The table as a picture: title above, headers shaded, numbers to the right."""
    font, title_font = ImageFont.load_default(size), ImageFont.load_default(size * 1.25)
    grid, row_height, margin = cells(table), round(size * 1.9), size
    widths = [0.0] * (len(table.row_heads) + len(table.columns))
    for cell in sorted(grid, key=lambda cell: cell.width):
        span = slice(cell.column, cell.column + cell.width)
        lacking = font.getlength(cell.text) + 1.4 * size - sum(widths[span])
        if lacking > 0:
            widths[span] = [w + lacking / cell.width for w in widths[span]]
    lefts = [margin]
    for column_width in widths:
        lefts.append(lefts[-1] + round(column_width))
    top = margin + round(size * 2.2)
    bottom = top + row_height * (_levels(table) + len(table.rows))
    right = max(lefts[-1], margin + round(title_font.getlength(table.title)))
    image = Image.new("RGB", (right + margin, bottom + margin), "white")
    pen = ImageDraw.Draw(image)
    pen.text((margin, margin), table.title, fill="black", font=title_font)
    for cell in grid:
        x0, x1 = lefts[cell.column], lefts[cell.column + cell.width]
        y0 = top + row_height * cell.row
        y1 = y0 + row_height * cell.height
        below_headers = cell.row >= _levels(table)
        fill = "white" if not cell.head else "#eef2f5" if below_headers else "#d5e0e8"
        pen.rectangle((x0, y0, x1, y1), fill=fill, outline="#607080")
        middle = (y0 + y1) / 2
        if not cell.head:
            place, anchor = (x1 - 0.6 * size, middle), "rm"
        elif below_headers:
            place, anchor = (x0 + 0.6 * size, middle), "lm"
        else:
            place, anchor = ((x0 + x1) / 2, middle), "mm"
        pen.text(place, cell.text, fill="black", font=font, anchor=anchor)
    return image.quantize(16, dither=Image.Dither.NONE)


def write(folder: Path) -> None:
    for name in ("image", "html", "markdown", "csv", "latex", "data"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for name, table in tables().items():
        draw(table).save(folder / "image" / f"{name}.png", optimize=True)
        with (folder / "csv" / f"{name}.csv").open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(as_rows(table))
        for kind, ending, text in (
            ("html", "html", as_html(table)),
            ("markdown", "md", as_markdown(table)),
            ("latex", "txt", as_latex(table)),
        ):
            (folder / kind / f"{name}.{ending}").write_text(text, encoding="utf-8", newline="\n")
    queries = [record(index, question) for index, question in enumerate(questions(), start=1)]
    text = json.dumps({"queries": queries}, indent=1, ensure_ascii=False) + "\n"
    (folder / "data" / "QA_final.json").write_text(text, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
