// One row: its images, prompt, reasoning and answer, its steps and its earlier attempts.
import { number, shownScore, timecode, when } from "./format.js";
import { button, byId, exact, folded, make, meter, terms, titled } from "./elements.js";
import { fetchJson, held } from "./data.js";

const LONG = 500; // characters: a longer prompt scrolls in its own box

// found: as /api/runs/{run}/rows/{index} gives it. Without the row's place, which drawPlace adds.
export function drawRow(detail, found, scorers) {
  const { record, attempts = [], steps = [] } = found, nav = detail.querySelector("nav") ?? make("nav");
  const held = nav.contains(document.activeElement) ? document.activeElement : null;
  const open = new Set([...detail.querySelectorAll("details[open] > summary")].map(titleOf));
  detail.replaceChildren(...[
    headOf(record, nav), errorOf(record), ...promptOf(found),
    pairOf(record, found.reference), scoresOf(record, scorers), ...choicesOf(found),
    ...steps.map((step) => stepOf(step, scorers)), attemptsOf(attempts), fieldsOf(found.fields), rawOf(record),
  ].filter(Boolean));
  for (const summary of detail.querySelectorAll("summary")) {
    summary.parentElement.open = open.has(titleOf(summary));
  }
  held?.focus();
}

// What is open stays so from row to row.
const titleOf = (summary) => summary.textContent.replace(/\d/g, "");

// step(by): to another row; place: where the row is among the total that pass the filters, or null.
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
  const [text, before, after] = nav.children, at = place === null ? "not on this page" : number.format(place + 1);
  text.textContent = `${place === null ? at : `${at} of ${number.format(total)}`}\u2002`;
  before.disabled = !place;
  after.disabled = place === null || place + 1 >= total;
}

function headOf(record, nav) {
  const head = make("header", "detail-head");
  const parts = [
    `row ${number.format(record.index)}`, ...figuresOf(record),
    record.finish_reason === "length" && "cut at max_tokens",
    record.truncated_tokens && `prompt cut by ${number.format(record.truncated_tokens)} tokens`,
    record.attempt > 1 && `attempt ${record.attempt}`,
    when(record.finished_at, { seconds: true }),
  ];
  head.append(make("strong", "", record.id), ...parts.filter(Boolean).map((part) => make("span", "", part)), nav);
  return head;
}

function figuresOf({ usage, latency_s: latency }) {
  const thought = usage?.reasoning_tokens;
  return [
    typeof latency === "number" && `${Number(latency.toPrecision(3))} s`,
    usage && `${number.format(usage.prompt_tokens)} + ${number.format(usage.completion_tokens)} tokens`,
    thought && `${number.format(thought)} of them reasoning`,
  ];
}

function errorOf({ error }) {
  return error ? make("p", "error", `${error.kind}\n${error.message ?? ""}`.trim()) : null;
}

// ---- the prompt

function promptOf({ record, prompt }) {
  const pictures = [picturesOf(prompt.images), ...(prompt.clips ?? []).map((clip) => playerOf(clip, record))];
  if (prompt.error) {
    const isSaid = record.error?.message?.includes(prompt.error);
    return [...pictures, isSaid ? null : make("p", "missing", `The prompt can't be shown: ${prompt.error}`)];
  }
  const messages = prompt.messages ?? [{ role: "", content: prompt.text }];
  return [...pictures, ...messages.map(({ role, content }) =>
    titled(role ? `Prompt: ${role}` : "Prompt", make("p", content.length > LONG ? "question long" : "question", content)))];
}

// {kind, src}, or {kind, problem}; poster: a frame of a video; with what was heard when, if the record says so.
function playerOf({ kind, src, problem, name, poster }, { segments = [], coverage }) {
  const box = make("div", "clip");
  const known = src?.startsWith(held ? `data:` : "/api/runs/") && ["audio", "video"].includes(kind);
  const still = isPicture({ src: poster }) ? poster : null, picture = () => enlargeable({ src: still, name: name ?? kind });
  if (!known) {
    if (still) box.append(picture());
    box.append(make("p", "missing", problem ?? "The clip is not shown."));
    return box;
  }
  const player = make(kind);
  Object.assign(player, { controls: true, preload: "metadata", src, ariaLabel: name ?? kind });
  if (still) player.poster = still;
  player.addEventListener("error", () => player.replaceWith(...(still ? [picture()] : []), missing(src)));
  box.append(player);
  if (coverage) {
    const where = coverage.gaps.map(([start, end]) => `${timecode(start)} to ${timecode(end)}`).join(", ");
    box.append(make("p", "error", `${coverage.missing_s} s of sound have no text: ${where}`));
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

// {src, name}, and its size; or {name, problem}. Of a server, the image's address is all that is known.
export const pictureOf = (image) => (held ? held.pictures[image] : { src: image });

const isPicture = ({ src }) => src?.startsWith(held ? "data:image/webp;base64," : "/api/runs/");

function picturesOf(images) {
  if (!images.length) return null;
  const box = make("div", "pictures");
  images.map(pictureOf).forEach((found, n) => {
    if (!isPicture(found)) {
      box.append(make("p", "missing", found.problem));
      return;
    }
    box.append(enlargeable({ name: `Image ${n + 1} of the prompt`, ...found }));
  });
  return box;
}

// large: the address of more of it.
export function enlargeable({ src, large = src, name, w, h }) {
  const image = make("img"), frame = button("", () => enlarge(large, name), "picture");
  if (w) Object.assign(image, { width: w, height: h });
  image.addEventListener("error", () => frame.replaceWith(missing(src)));
  Object.assign(image, { src, alt: name });
  Object.assign(frame, { title: name, ariaLabel: `${name}, larger` });
  frame.append(image);
  return frame;
}

// The server says why there is no image.
function missing(url) {
  const box = make("p", "missing", "…");
  fetchJson(url).then(() => "not an image", (error) => error.message).then((text) => { box.textContent = text; });
  return box;
}

function enlarge(src, alt) {
  const box = byId("lightbox");
  Object.assign(box.querySelector("img"), { src, alt });
  box.showModal();
}

export function enlargeFirst(detail) {
  const image = detail.querySelector(".picture");
  image?.click();
  return image !== null;
}

// ---- what the model said

// answers: each choice in words, its tool calls among them; of a pooling task, what the model found.
function choicesOf({ record, answers }) {
  if (record.status !== "ok") return [];
  const choices = record.choices ?? [record];
  return choices.flatMap((choice, n) => said({
    title: choices.length > 1
      ? `Answer ${n + 1} of ${choices.length}${n === record.selected ? ", selected" : ""}` : "Answer",
    reasoning: choice.reasoning, text: answers?.[n] ?? choice.text,
  }));
}

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
  head.append(...facts.filter(Boolean).map((fact) => make("span", "", fact)));
  const calls = (step.tool_calls ?? []).map(({ function: called }) => `${called.name}(${called.arguments})`);
  const text = [step.text, ...calls].filter(Boolean).join("\n");
  box.append(head, ...[
    step.reasoning && folded("Reasoning", make("div", "prompt", step.reasoning)),
    step.error ? errorOf(step) : !step.skipped && make("div", text ? "full" : "full nothing", text || "(none)"),
  ].filter(Boolean));
  return box;
}

function said({ title, reasoning, text }) {
  return [
    reasoning ? folded(title === "Answer" ? "Reasoning" : `${title}: reasoning`, make("div", "prompt", reasoning)) : null,
    titled(title, make("div", text ? "full" : "full nothing", text || "(none)")),
  ];
}

function pairOf({ prediction }, reference) {
  if (typeof prediction !== "string" && typeof reference !== "string") return null;
  const pair = make("div", "pair");
  if (typeof reference === "string") pair.append(titled("Reference", exact(reference, prediction)));
  pair.append(titled("Prediction", exact(prediction ?? null, reference)));
  return pair;
}

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

function attemptsOf(attempts) {
  if (!attempts.length) return null;
  const parts = attempts.flatMap((record) => {
    const head = [`attempt ${record.attempt}`, record.status, when(record.finished_at, { seconds: true })];
    return [make("h3", "", head.filter(Boolean).join(", ")), errorOf(record)
      ?? make("div", "full", record.text ?? "(none)")];
  });
  return folded(`Earlier records of this row: ${attempts.length}`, ...parts);
}

function fieldsOf(fields) {
  const names = Object.entries(fields);
  if (!names.length) return null;
  const list = make("dl", "fields");
  list.append(...terms(names));
  return folded(`Fields of the row: ${names.length}`, list);
}

const rawOf = (record) => folded("Record", make("div", "prompt", JSON.stringify(record, null, 2)));
