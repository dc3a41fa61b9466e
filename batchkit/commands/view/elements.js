// Elements that all parts of the page share. Every text of a run reaches the page through textContent or append,
// never as HTML.
import { number } from "./format.js";

/** @typedef {string | Node} Cell */

/**
 * The element with this id. Without it, the result is null; only pages that lack one check for that.
 * @template {HTMLElement} [T=HTMLElement]
 * @param {string} id @param {new () => T} [kind]
 */
export function byId(id, kind) {
  const element = document.getElementById(id);
  if (kind && element && !(element instanceof kind)) throw new TypeError(`#${id} is not a ${kind.name}`);
  return /** @type {T} */ (element);
}

/**
 * @template {keyof HTMLElementTagNameMap} T
 * @param {T} tag @param {string} [className] @param {string | null} [text]
 */
export function make(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined && text !== null) element.textContent = text;
  return element;
}

/** @param {keyof SVGElementTagNameMap} tag @param {Record<string, string | number>} attributes */
export function shape(tag, attributes) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, String(value));
  return element;
}

/**
 * A bar of two shares, each from 0 to 1; the failed ones come after the others.
 * @param {number} share
 */
export function meter(share, failed = 0) {
  const root = shape("svg", {
    class: "meter", viewBox: "0 0 100 1", preserveAspectRatio: "none", "aria-hidden": "true",
  });
  root.append(shape("rect", { class: "track", width: 100, height: 1 }));
  const filled = 100 * Math.min(1, Math.max(0, share));
  root.append(shape("rect", { class: "fill", width: filled.toFixed(2), height: 1 }));
  if (failed > 0) {
    const width = Math.max(0.4, 100 * Math.min(1 - filled / 100, failed)).toFixed(2);
    root.append(shape("rect", { class: "fill failed", x: filled.toFixed(2), width, height: 1 }));
  }
  return root;
}

/**
 * A line of a <dl> for each name and value.
 * @param {[Cell, Cell][]} pairs
 */
export function terms(pairs) {
  return pairs.map(([name, value]) => {
    const line = make("div"), term = make("dt"), definition = make("dd");
    term.append(name);
    definition.append(value);
    line.append(term, definition);
    return line;
  });
}

/** @param {string} title @param {Node} element */
export function titled(title, element) {
  const box = make("div");
  box.append(make("h3", "", title), element);
  return box;
}

/** @param {string} name @param {Node[]} parts */
export function folded(name, ...parts) {
  const box = make("details"), summary = make("summary", "", name);
  box.append(summary, ...parts);
  return box;
}

/**
 * A text. Words that the other text lacks are marked if the two have some in common: a hint for the eye, not a score.
 * @param {string | null} text @param {string | null} [other]
 */
export function exact(text, other) {
  const box = make("p", "exact", text);
  if (!text) {
    box.classList.add("nothing");
    box.textContent = text === "" ? "(empty)" : "none";
    return box;
  }
  if (!other || Math.max(text.length, other.length) > 2000) return box;
  /** @param {string} word */
  const plain = (word) => word.toLowerCase().replace(/^[\p{P}\p{S}]+|[\p{P}\p{S}]+$/gu, "");
  const there = new Set(other.split(/\s+/).map(plain));
  /** @param {string} part */
  const lacks = (part) => plain(part.trim()) !== "" && !there.has(plain(part.trim()));
  const parts = text.split(/(\s+)/);
  const words = parts.filter((part) => plain(part.trim()));
  if (words.every(lacks)) return box;
  box.replaceChildren(...parts.map((part) =>
    lacks(part) ? make("mark", "", part) : document.createTextNode(part)));
  return box;
}

/**
 * Marks each of the words in the element's text.
 * @param {Node} element @param {string} text
 */
export function highlight(element, text) {
  if (!globalThis.CSS?.highlights) return;
  CSS.highlights.delete("found");
  const words = text.toLowerCase().split(/\s+/).filter((word) => word.length > 1);
  if (!words.length) return;
  const ranges = [];
  const walker = document.createTreeWalker(element, NodeFilter.SHOW_TEXT);
  while (walker.nextNode() && ranges.length < 500) {
    const node = /** @type {Text} */ (walker.currentNode), text = node.data.toLowerCase();
    if (text.length !== node.data.length) continue; // a letter that changes its length
    for (const word of words) {
      for (let from = text.indexOf(word); from >= 0; from = text.indexOf(word, from + word.length)) {
        const range = new Range();
        range.setStart(node, from);
        range.setEnd(node, from + word.length);
        ranges.push(range);
      }
    }
  }
  CSS.highlights.set("found", new Highlight(...ranges));
}

/** @param {string} state */
export const stateBadge = (state) => make("span", `state ${state.replaceAll(" ", "-")}`, state);

export const focused = () => (document.activeElement instanceof HTMLElement ? document.activeElement : null);

/** @param {ParentNode} box @param {string} selector */
export function focusOn(box, selector) {
  /** @type {HTMLElement | null} */ (box.querySelector(selector))?.focus();
}

/** @param {string} text @param {string} url */
export function link(text, url, className = "") {
  const element = make("a", className, text);
  element.href = url;
  return element;
}

/** @param {string} text @param {() => void} act */
export function button(text, act, className = "quiet") {
  const element = make("button", className, text);
  element.type = "button";
  element.addEventListener("click", act);
  return element;
}

/**
 * A line of a table. Its first cell is a heading.
 * @param {(Cell | null | undefined)[]} cells
 */
function line(cells, isHead = false) {
  const row = make("tr");
  cells.forEach((content, place) => {
    const cell = make(isHead || !place ? "th" : "td");
    if (isHead) cell.scope = "col";
    else if (!place) cell.scope = "row";
    cell.append(content ?? "");
    row.append(cell);
  });
  return row;
}

/** @param {Cell[]} heads @param {(Cell | null | undefined)[][]} lines */
export function table(heads, lines, className = "") {
  const found = make("table", `scores ${className}`), head = make("thead"), body = make("tbody");
  head.append(line(heads, true));
  body.append(...lines.map((cells) => line(cells)));
  found.append(head, body);
  return found;
}

/**
 * Shows the text in the element, or hides the element if there is none.
 * @param {string} id @param {string} text
 */
export function note(id, text) {
  const element = byId(id);
  element.hidden = !text;
  if (element.textContent !== text) element.textContent = text;
}

/**
 * "1–50 of 1,234" between two buttons. go() is called with the offset of the page.
 * @param {HTMLElement} nav
 * @param {{ offset: number, limit: number, total: number, n: number, go: (offset: number) => void }} page
 */
export function drawPager(nav, { offset, limit, total, n, go }) {
  const span = n ? `${number.format(offset + 1)}–${number.format(offset + n)} of ${number.format(total)}` : "";
  const held = nav.contains(document.activeElement) ? document.activeElement?.ariaLabel : null;
  const before = button("←", () => go(Math.max(0, offset - limit)), "");
  const after = button("→", () => go(offset + limit), "");
  before.ariaLabel = "Previous page";
  after.ariaLabel = "Next page";
  before.disabled = offset === 0;
  after.disabled = offset + n >= total;
  nav.replaceChildren(before, make("span", "", span), after);
  nav.hidden = before.disabled && after.disabled;
  [before, after].find((one) => one.ariaLabel === held)?.focus();
}

/**
 * Calls onKey(event) for keys outside of controls and dialogs. Esc and ? are equal on all pages: clear() is for an Esc
 * outside of a control. help: the keys, and what they do.
 * @param {{
 *   list: HTMLElement, clear: () => void, onKey: (event: KeyboardEvent) => boolean, onEnter?: () => void,
 *   help: [string, string][],
 * }} page
 */
export function listenToKeys({ list, clear, onKey, onEnter, help }) {
  byId("key-list").replaceChildren(...[...help, ["?", "this list"]].flatMap(([keys, text]) => {
    const names = make("span");
    names.append(...keys.split(" ").flatMap((key) => [make("kbd", "", key), " "]));
    return terms([[names, text]]);
  }));
  const keys = byId("keys", HTMLDialogElement), search = byId("search", HTMLInputElement);
  byId("help").addEventListener("click", () => keys.showModal());
  for (const dialog of document.querySelectorAll("dialog")) {
    dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
  }
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
    const typing = /** @type {Element} */ (event.target).closest("input:not([type=checkbox]), select, textarea");
    if (event.key === "Escape") {
      if (typing) list.focus();
      else clear();
    } else if (typing) {
      if (typing.id !== "search" || !["Enter", "ArrowDown"].includes(event.key)) return;
      onEnter?.();
      list.focus();
    } else if (event.key === "/") {
      search?.focus();
      search?.select();
    } else if (event.key === "?") keys.showModal();
    else if (!onKey(event)) return;
    event.preventDefault();
  });
}
