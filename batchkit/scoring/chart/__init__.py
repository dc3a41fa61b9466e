"""Charts that a model wrote as code: run in a sandbox, read from pyplot, compared with the reference.

A chart's code can falsify its own score: the values are read in the interpreter that ran the code,
so malicious code can return any values. It has no reference to copy, though, and can affect only
its own row's score.

Two modes. ``official`` is what RealHiTBench's own runner does under numpy 1.26; ``fixed`` corrects
what makes good charts fail in that runner. ``fixed`` also reads everything that ``official`` reads:
code that does the same in both, and passes under ``official``, passes under ``fixed``.

=============================  ====================================  ================================
what                           official                              fixed
=============================  ====================================  ================================
code in the answer             last ``import pandas … plt.show()``,  last fenced block that draws,
                               else from ``import matplotlib…``      closed or not; else as official,
                                                                     to the last ``plt.show()``; else
                                                                     from the first import on
no ``plt.show()``              no code                               runs
indentation                    spaces at both ends are stripped:     kept; stray spaces, tabs, curly
                               a loop indented by them fails         quotes fixed if it won't compile
names in comprehensions,       those of the code itself are not      as in any script
functions and lambdas          seen (exec with a locals of its own)
name of the table              ``'….xlsx'``, or ``table.xlsx``       also ``"….xlsx"``, but not where
                                                                     a file is written
what it prints                 corrupts the values                   is ignored
axes                           the current one                       or all of the figure (twinx,
                                                                     subplots)
``plt.close()``                leaves no values                      is ignored
lines of the chart             all                                   all
bars                           heights of all patches                or widths of horizontal bars
                                                                     and of nothing but bars
scatter                        all collections                       or collections of points, and
                                                                     lines of only markers
reference of a pie             divided by its sum                    or as it is, if it sums to 1
                                                                     within 0.05
NaN, masked                    fails; a reference with one is        equal to each other
                               unscored
equal                          after ``round(…, 2)``                 or within 1e-9 of each other
=============================  ====================================  ================================

"or": the chart passes if either reading equals the reference.

In both, a chart without values (the official Pass "None") does not pass; a chart whose reference is
not a list, or has no numbers under ``fixed``, is unscored. In neither can code remove files, so
code that writes a spreadsheet fails.
"""

from batchkit.scoring.chart.answer import chart_code
from batchkit.scoring.chart.sandbox import Sandbox, SandboxError, SandboxLimits
from batchkit.scoring.chart.score import Chart, ChartScore, same_values, score_chart, score_charts
from batchkit.scoring.overlap import Mode

__all__ = [
    "Chart",
    "ChartScore",
    "Mode",
    "Sandbox",
    "SandboxError",
    "SandboxLimits",
    "chart_code",
    "same_values",
    "score_chart",
    "score_charts",
]
