"use strict";
// For the report and the view. All text of a run gets onto a page through textContent and
// createTextNode alone.

const byId = (id) => document.getElementById(id);
const number = new Intl.NumberFormat("en-US");
const oneLine = (text) => (text ?? "").slice(0, 300).replace(/\s+/g, " ").trim();

function make(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined && text !== null) element.textContent = text;
  return element;
}

function shape(tag, attributes) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

// Shares from 0 to 1; the failed ones come after the others.
function meter(share, failed = 0) {
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

function titled(title, element) {
  const box = make("div");
  box.append(make("h3", "", title), element);
  return box;
}

// Words that the other text lacks are marked, where the two have some in common: a hint for the
// eye, no score.
function exact(text, other) {
  const box = make("p", "exact", text);
  if (!text) {
    box.classList.add("nothing");
    box.textContent = text === "" ? "(empty)" : "none";
    return box;
  }
  if (!other || Math.max(text.length, other.length) > 2000) return box;
  const plain = (word) => word.toLowerCase().replace(/^[\p{P}\p{S}]+|[\p{P}\p{S}]+$/gu, "");
  const there = new Set(other.split(/\s+/).map(plain));
  const lacks = (part) => plain(part.trim()) !== "" && !there.has(plain(part.trim()));
  const parts = text.split(/(\s+)/);
  const words = parts.filter((part) => plain(part.trim()));
  if (words.every(lacks)) return box;
  box.replaceChildren(...parts.map((part) =>
    lacks(part) ? make("mark", "", part) : document.createTextNode(part)));
  return box;
}

// Marks each of the words where it stands in the element's text.
function highlight(element, words) {
  if (!globalThis.CSS?.highlights) return;
  CSS.highlights.delete("found");
  words = words.toLowerCase().split(/\s+/).filter((word) => word.length > 1);
  if (!words.length) return;
  const ranges = [];
  const walker = document.createTreeWalker(element, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node && ranges.length < 500; node = walker.nextNode()) {
    const text = node.data.toLowerCase();
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
