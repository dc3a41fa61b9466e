// The page is one of three: a run, two runs, or the list of runs.
import { byId } from "./elements.js";
import { held } from "./data.js";
import { openRun } from "./run.js";
import { openComparison } from "./compare.js";
import { openRuns } from "./runs.js";

/** @returns {[string, () => void]} the page's template, and the function that fills it */
function pageOf() {
  if (held ? held.comparison : location.pathname === "/compare") return ["compare", openComparison];
  return held || location.pathname.startsWith("/run/") ? ["run", openRun] : ["runs", openRuns];
}

function openPage() {
  const [name, open] = pageOf();
  const template = byId(`page-${name}`, HTMLTemplateElement);
  template.replaceWith(template.content);
  byId("made").textContent = held
    ? `${held.made} This page holds all that it shows and fetches nothing.`
    : "Served by batchkit from the runs’ folders, which it only reads.";
  if (!held && byId("brand")) byId("brand").textContent = "batchkit view";
  open();
}

openPage();
