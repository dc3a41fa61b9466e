// One row: its images, prompt, reasoning and answer, its steps and its earlier attempts.
import { duration, number, short, shownScore, timecode, when } from "./format.js";
import { button, byId, exact, focused, folded, make, meter, terms, titled } from "./elements.js";
import { fetchJson, held } from "./data.js";
/** @import { Beside, Choice, Clip, Failure, Picture, Row, RowRecord, Scorer, Step, Usage } from "./types.js" */

/** @typedef {Map<string, Scorer>} Scorers by name */

const LONG = 500; // characters: a longer prompt scrolls in its own box

/**
 * Draws a row, without its place among the rows: drawPlace() does that.
 * @param {HTMLElement} detail @param {Row} found @param {Scorers} scorers
 */
export function drawRow(detail, found, scorers) {
  const { record, attempts = [], steps = [] } = found, nav = detail.querySelector("nav") ?? make("nav");
  const held = nav.contains(document.activeElement) ? focused() : null;
  const open = new Set([...detail.querySelectorAll("details[open] > summary")].map(titleOf));
  detail.replaceChildren(...[
    headOf(record, nav), errorOf(record), ...promptOf(found),
    pairOf(record, found.reference), scoresOf(record, scorers), ...choicesOf(found),
    ...steps.map((step) => stepOf(step, scorers)), attemptsOf(attempts), fieldsOf(found.fields), rawOf(record),
  ].flatMap((part) => part ?? []));
  for (const summary of detail.querySelectorAll("summary")) {
    /** @type {HTMLDetailsElement} */ (summary.parentElement).open = open.has(titleOf(summary));
  }
  held?.focus();
}

/**
 * The name of a folded part. It is equal in all rows, so that an open part stays open from row to row.
 * @param {Element} summary
 */
const titleOf = (summary) => (summary.textContent ?? "").replace(/\d/g, "");

/**
 * step(by) goes to another row; place: the row's place among the rows that pass the filters, or null.
 * @param {HTMLElement} detail @param {{ step: (by: number) => void, place: number | null, total: number }} page
 */
export function drawPlace(detail, { step, place, total }) {
  const nav = detail.querySelector("nav");
  if (!nav) return;
  if (!nav.firstChild) {
    nav.ariaLabel = "Rows";
    const [before, after] = [button("↑", () => step(-1), ""), button("↓", () => step(1), "")];
    before.ariaLabel = "Previous row";
    after.ariaLabel = "Next row";
    nav.append(make("span"), before, after);
  }
  const [before, after] = nav.querySelectorAll("button"), at = place === null ? "not on this page" : number.format(place + 1);
  nav.children[0].textContent = `${place === null ? at : `${at} of ${number.format(total)}`}\u2002`;
  before.disabled = !place;
  after.disabled = place === null || place + 1 >= total;
}

/** @param {RowRecord} record @param {HTMLElement} nav */
function headOf(record, nav) {
  const head = make("header", "detail-head");
  const parts = [
    `row ${number.format(record.index)}`, ...figuresOf(record),
    record.finish_reason === "length" && "cut at max_tokens",
    record.truncated_tokens && `prompt cut by ${number.format(record.truncated_tokens)} tokens`,
    record.duplicate_of !== undefined && `copied from row ${number.format(record.duplicate_of)}`,
    record.reused_from && `copied from ${record.reused_from}`,
    record.attempt > 1 && `attempt ${record.attempt}`,
    when(record.finished_at, { seconds: true }),
  ];
  head.append(make("strong", "", record.id), ...spans(parts), nav);
  return head;
}

/** @param {(string | false | 0 | null | undefined)[]} texts */
const spans = (texts) => texts.flatMap((text) => (text ? [make("span", "", text)] : []));

/** @param {{ usage?: Usage | null, latency_s?: number | null }} record */
function figuresOf({ usage, latency_s: latency }) {
  const thought = usage?.reasoning_tokens;
  return [
    short(latency, "s"),
    usage && `${number.format(usage.prompt_tokens)} + ${number.format(usage.completion_tokens)} tokens`,
    thought && `${number.format(thought)} of them reasoning`,
  ];
}

/** @param {{ error?: Failure | null }} record */
function errorOf({ error }) {
  return error ? make("p", "error", `${error.kind}\n${error.message ?? ""}`.trim()) : null;
}

// ---- the prompt

/** @param {Row} row */
function promptOf({ record, prompt }) {
  const pictures = [picturesOf(prompt.images), ...(prompt.clips ?? []).map((clip) => playerOf(clip, record))];
  if (prompt.error) {
    const isSaid = record.error?.message?.includes(prompt.error);
    return [...pictures, isSaid ? null : make("p", "missing", `The prompt can't be shown: ${prompt.error}`)];
  }
  const messages = prompt.messages ?? [{ role: "", content: prompt.text ?? "" }];
  return [...pictures, ...messages.map(({ role, content }) =>
    titled(role ? `Prompt: ${role}` : "Prompt", make("p", content.length > LONG ? "question long" : "question", content)))];
}

/**
 * A clip with its transcript, if the record has one. Its poster is a frame of a video.
 * @param {Clip} clip @param {RowRecord} record
 */
function playerOf({ kind, src, problem, name, poster }, { segments = [], coverage }) {
  const box = make("div", "clip");
  const still = () => (isPicture(poster) ? [enlargeable({ src: poster, name: name ?? kind })] : []);
  if (!src?.startsWith(held ? `data:` : "/api/runs/") || (kind !== "audio" && kind !== "video")) {
    box.append(...still(), make("p", "missing", problem ?? "The clip is not shown."));
    return box;
  }
  const player = make(kind);
  Object.assign(player, { controls: true, preload: "metadata", src, ariaLabel: name ?? kind });
  if (isPicture(poster)) Object.assign(player, { poster });
  player.addEventListener("error", () => player.replaceWith(...still(), missing(src)));
  box.append(player);
  if (coverage) {
    const where = coverage.gaps.map(([start, end]) => `${timecode(start)} to ${timecode(end)}`).join(", ");
    box.append(make("p", "error", `${duration(coverage.missing_s)} of sound have no text: ${where}`));
  }
  if (segments.length) {
    const list = make("ol", "segments");
    list.append(...segments.map((segment) => {
      const line = make("li"), at = button(timecode(segment.start), () => { player.currentTime = segment.start; player.play(); }, "");
      line.append(at, make("span", "", segment.text));
      return line;
    }));
    box.append(list);
  }
  return box;
}

/**
 * An image of a prompt: a place in the file's pictures, or an address on the server.
 * @param {string | number} image
 * @returns {Picture}
 */
export const pictureOf = (image) => (held ? held.pictures[Number(image)] : { src: String(image) });

/**
 * @param {string | undefined} src
 * @returns {src is string}
 */
const isPicture = (src) => Boolean(src?.startsWith(held ? "data:image/webp;base64," : "/api/runs/"));

/** @param {(string | number)[]} images */
function picturesOf(images) {
  if (!images.length) return null;
  const box = make("div", "pictures");
  box.append(...images.map(pictureOf).map(({ src, problem, ...found }, n) => (isPicture(src)
    ? enlargeable({ name: `Image ${n + 1} of the prompt`, ...found, src }) : make("p", "missing", problem))));
  return box;
}

/**
 * A picture in a button that enlarges it. large: the address of a larger one.
 * @param {Picture & { src: string, large?: string }} picture
 */
export function enlargeable({ src, large = src, name = "", w, h }) {
  const image = make("img"), frame = button("", () => enlarge(large, name), "picture");
  if (w) Object.assign(image, { width: w, height: h });
  image.addEventListener("error", () => frame.replaceWith(missing(src)));
  Object.assign(image, { src, alt: name });
  Object.assign(frame, { title: name, ariaLabel: `${name}, larger` });
  frame.append(image);
  return frame;
}

/**
 * The server's reason why there is no image.
 * @param {string} url
 */
function missing(url) {
  const box = make("p", "missing", "…");
  fetchJson(url).then(() => "not an image", (error) => error.message).then((text) => { box.textContent = text; });
  return box;
}

/** @param {string} src @param {string} alt */
function enlarge(src, alt) {
  const box = byId("lightbox", HTMLDialogElement);
  Object.assign(/** @type {HTMLImageElement} */ (box.querySelector("img")), { src, alt });
  box.showModal();
}

/** @param {HTMLElement} detail */
export function enlargeFirst(detail) {
  const image = detail.querySelector("button.picture");
  if (image instanceof HTMLButtonElement) image.click();
  return image !== null;
}

// ---- what the model said

/**
 * The answers: the text and tool calls of each choice, or the result of a pooling task.
 * @param {Row} row
 */
function choicesOf({ record, answers }) {
  if (record.status !== "ok") return [];
  /** @type {Choice[]} */
  const choices = record.choices ?? [record];
  return choices.flatMap((choice, n) => said({
    title: choices.length > 1
      ? `Answer ${n + 1} of ${choices.length}${n === record.selected ? ", selected" : ""}` : "Answer",
    reasoning: choice.reasoning, text: answers?.[n] ?? choice.text,
  }));
}

/** @param {Step} step @param {Scorers} scorers */
export function stepOf(step, scorers) {
  if (step.more) return make("p", "caption", `and ${number.format(step.more)} generations more`);
  const box = make("section", "step"), head = make("header", "detail-head");
  const nth = step.call ? `, call ${step.call + 1}` : "";
  const facts = [
    step.engine, step.skipped && "skipped", step.prediction !== undefined && step.prediction !== null && `prediction: ${step.prediction}`,
    ...Object.entries(step.scores ?? {}).map(([name, score]) => `${scorers.get(name)?.head ?? name} ${shownScore(score, scorers.get(name))}`),
    ...figuresOf(step),
  ];
  head.append(make("strong", "", step.step ? step.step + nth : `call ${(step.call ?? 0) + 1}`));
  head.append(...spans(facts));
  const calls = (step.tool_calls ?? []).map(({ function: called }) => `${called?.name}(${called?.arguments ?? ""})`);
  const text = [step.text, ...calls].filter(Boolean).join("\n");
  box.append(head);
  if (step.reasoning) box.append(folded("Reasoning", make("div", "prompt", step.reasoning)));
  const error = errorOf(step);
  if (error) box.append(error);
  else if (!step.skipped) box.append(make("div", text ? "full" : "full nothing", text || "(none)"));
  return box;
}

/** @param {{ title: string, reasoning?: string | null, text?: string | null }} answer */
function said({ title, reasoning, text }) {
  return [
    reasoning ? folded(title === "Answer" ? "Reasoning" : `${title}: reasoning`, make("div", "prompt", reasoning)) : null,
    titled(title, make("div", text ? "full" : "full nothing", text || "(none)")),
  ];
}

/** @param {RowRecord} record @param {unknown} reference */
function pairOf({ prediction }, reference) {
  if (typeof prediction !== "string" && typeof reference !== "string") return null;
  const pair = make("div", "pair");
  if (typeof reference === "string") pair.append(titled("Reference", exact(reference, prediction)));
  pair.append(titled("Prediction", exact(prediction ?? null, typeof reference === "string" ? reference : null)));
  return pair;
}

/** @param {RowRecord} record @param {Scorers} scorers */
function scoresOf(record, scorers) {
  const scores = Object.entries(record.scores ?? {});
  if (record.status !== "ok" || !scores.length) return null;
  const box = make("dl", "values");
  box.append(...terms(scores.map(([name, score]) => {
    const scorer = scorers.get(name), shown = shownScore(score, scorer);
    return [scorer?.head ?? name, shown === "–" ? "unscored" : shown];
  })));
  scores.forEach(([name, score], n) => {
    if (typeof score === "number") box.children[n].append(meter(scorers.get(name)?.scale === 1 ? score / 10 : score));
  });
  if (record.unscored) box.append(...terms([["unscored", record.unscored]]));
  return box;
}

// ---- folded away

/** @param {RowRecord[]} attempts */
function attemptsOf(attempts) {
  if (!attempts.length) return null;
  const parts = attempts.flatMap((record) => {
    const head = [`attempt ${record.attempt}`, record.status, when(record.finished_at, { seconds: true })];
    return [make("h3", "", head.filter(Boolean).join(", ")), errorOf(record)
      ?? make("div", "full", record.text ?? "(none)")];
  });
  return folded(`Earlier records of this row: ${attempts.length}`, ...parts);
}

/** @param {Record<string, string>} fields */
function fieldsOf(fields) {
  const names = Object.entries(fields);
  if (!names.length) return null;
  const list = make("dl", "fields");
  list.append(...terms(names));
  return folded(`Fields of the row: ${names.length}`, list);
}

/** @param {RowRecord} record */
const rawOf = (record) => folded("Record", make("div", "prompt", JSON.stringify(record, null, 2)));
