// The page is one of three: a run, two runs, or the list of runs.
import { byId } from "./elements.js";
import { held } from "./data.js";
import { openRun } from "./run.js";
import { openComparison } from "./compare.js";
import { openRuns } from "./runs.js";

function openPage() {
  const isComparison = held ? held.comparison : location.pathname === "/compare";
  const isRun = held || location.pathname.startsWith("/run/");
  const [name, open] = isComparison ? ["compare", openComparison] : isRun ? ["run", openRun] : ["runs", openRuns];
  byId(`page-${name}`).replaceWith(byId(`page-${name}`).content);
  byId("made").textContent = held
    ? `${held.made} This page holds all that it shows and fetches nothing.`
    : "Served by batchkit from the runs’ folders, which it only reads.";
  if (!held && byId("brand")) byId("brand").textContent = "batchkit view";
  open();
}

openPage();
