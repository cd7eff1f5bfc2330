// One sample on the page: a span for each position, masks included.

import { compare } from "./variety.js";

const END = /^(<\|endoftext\|>|<\/s>|<eos>|<pad>|\[EOS\]|\[SEP\]|\[PAD\])$/;

const RESIDUES = {
  oily: "AVLIM", ring: "FWY", polar: "STNQ", positive: "KRH", negative: "DE", special: "GPC",
};
const CLASS_OF = new Map(
  Object.entries(RESIDUES).flatMap(([name, letters]) => [...letters].map((letter) => [letter, name])),
);

/** Classes of residues and their letters, for the legend. */
export const residueClasses = Object.entries(RESIDUES);

/**
 * Position at which a row's text ends: that of its first end mark, else its length. Ends that fill
 * the window behind a text are given; one that is given first only says that a text begins.
 */
function endOf(row, given) {
  const end = row.findIndex((piece, i) => piece !== null && END.test(piece) && !(i === 0 && given[i]));
  return end < 0 ? row.length : end;
}

/** A text that is being written. Holds no history: `draw` gets the row, the one before and the last. */
export class SampleView {
  /** `proteins`: pieces are residues, coloured by class. */
  constructor(proteins) {
    this.proteins = proteins;
    this.element = document.createElement("p");
    this.element.className = proteins ? "canvas protein" : "canvas";
    this.spans = [];
    this.given = [];
    this.row = [];
    this.kinds = new Map();
  }

  /** Show a row of pieces; `earlier` tells what is new, `last` (or null) how wide masks will be. */
  draw(row, earlier, last) {
    if (!this.row.length) {
      // A row without masks comes from a model that starts from noise: nothing of it is given.
      const masked = row.includes(null);
      this.given = row.map((piece) => masked && piece !== null);
    }
    while (this.spans.length < row.length) {
      const span = document.createElement("span");
      this.spans.push(span);
      this.element.append(span);
    }
    this.row = row;
    const end = endOf(row, this.given);
    this.spans.forEach((span, i) => this.#paint(span, i, row, earlier, last, end));
  }

  #paint(span, i, row, earlier, last, end) {
    const piece = row[i];
    const hidden = piece === null || piece === undefined;
    const shown = hidden ? last?.[i] ?? null : piece;
    const ending = shown !== null && END.test(shown);
    const classes = ["t"];
    if (hidden) classes.push("mask");
    if (shown === null) classes.push("blank");
    if (ending) classes.push("end");
    if (this.given[i]) classes.push("given");
    else if (!hidden && earlier && earlier[i] !== piece) classes.push("fresh");
    if (i > end) classes.push("past");
    if (!hidden && this.proteins && CLASS_OF.has(piece.trim())) classes.push(CLASS_OF.get(piece.trim()));
    if (!hidden && this.kinds.has(i)) classes.push(this.kinds.get(i));
    const name = classes.join(" ");
    if (span.className !== name) span.className = name;
    const text = shown === null || ending ? "" : shown;
    if (span.textContent !== text) span.textContent = text;
    if (hidden) span.setAttribute("aria-hidden", "true");
    else span.removeAttribute("aria-hidden");
  }

  /** Text up to its end, without masks; what was given is part of it. */
  text() {
    return this.#pieces().map(({ piece }) => piece).join("");
  }

  /** Text that the model wrote, up to its end. */
  written() {
    return this.#pieces().map(({ piece, i }) => (this.given[i] ? " ".repeat(piece.length) : piece)).join("");
  }

  /** Where the reader's selection lies in the text, or null where it is elsewhere. */
  selection() {
    const chosen = document.getSelection();
    if (!chosen.rangeCount || chosen.isCollapsed) return null;
    const range = chosen.getRangeAt(0);
    if (!this.element.contains(range.startContainer) || !this.element.contains(range.endContainer)) return null;
    const before = document.createRange();
    before.setStart(this.element, 0);
    before.setEnd(range.startContainer, range.startOffset);
    const from = before.toString().length;
    const to = Math.min(from + range.toString().length, this.text().length);
    return from < to ? { from, to } : null;
  }

  /** Mark words by what `compare` found of them. */
  mark(words) {
    this.kinds = new Map();
    let start = 0;
    for (const { piece, i } of this.#pieces()) {
      const end = start + piece.length;
      const word = words.find((w) => w.from < end && w.to > start);
      if (word && word.kind !== "plain") this.kinds.set(i, word.kind);
      start = end;
    }
  }

  #pieces() {
    const end = endOf(this.row, this.given);
    return this.row.flatMap((piece, i) => (i < end && piece !== null ? [{ piece, i }] : []));
  }
}

/** Mark what samples share and what only one has; returns the shares of words. */
export function markVariety(views) {
  const found = compare(views.map((view) => view.written()));
  views.forEach((view, i) => view.mark(found.words[i]));
  return found;
}
