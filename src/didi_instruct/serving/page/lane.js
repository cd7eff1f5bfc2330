// A lane: one model at one pace, its numbers, its samples, and the steps that can be looked at again.

import { SampleView, markVariety } from "./canvas.js";
import { describe } from "./plan.js";

const percent = (share) => `${Math.round(100 * share)}%`;

/** Make an element with a class and a text. */
function element(tag, className = "", text = "") {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text) made.textContent = text;
  return made;
}

/** Seconds as they are shown: two digits below ten. */
export const inSeconds = (s) => `${s < 10 ? s.toFixed(2) : s.toFixed(1)} s`;

/** Passes per text, which samplers that differ between texts make a mean. */
const inPasses = (passes) => (Number.isInteger(passes) ? String(passes) : passes.toFixed(1));

/** Perplexity of several texts of one weight: surprise adds up in logarithms. */
const together = (perplexities) =>
  Math.exp(perplexities.reduce((sum, value) => sum + Math.log(value), 0) / perplexities.length);

/** One lane of the race. States: waiting, writing, done, stopped, failed, out. */
export class Lane {
  /** `rewrite(text, selection)` is called when the reader wants to rewrite a sample; `moved()` after a scrub. */
  constructor(choice, settings, number, { rewrite, moved }) {
    this.choice = choice;
    this.samples = settings.samples;
    this.infill = settings.mode === "infill";
    this.state = "waiting";
    this.frames = [];
    this.completion = null;
    this.position = null; // a frame's number; null follows the last
    this.rewrite = rewrite;
    this.moved = moved;
    this.pieces = new Map();
    this.#build(describe(choice, settings), `lane-${number}`);
  }

  #build(how, id) {
    this.element = element("article", "lane card");
    this.element.setAttribute("aria-labelledby", `${id}-name`);
    const name = element("h3", "", this.choice.title);
    name.id = `${id}-name`;
    const list = element("dl", "numbers");
    this.numbers = {};
    for (const [key, label] of [
      ["passes", "Passes"], ["seconds", "Seconds"], ["rate", "Tokens a second"], ["perplexity", "Perplexity"],
    ]) {
      const pair = list.appendChild(element("div"));
      pair.append(element("dt", "", label));
      this.numbers[key] = pair.appendChild(element("dd", "", "–"));
    }
    this.trouble = element("p", "trouble");
    this.trouble.hidden = true;
    this.texts = element("div", "texts");
    this.texts.tabIndex = 0;
    this.texts.setAttribute("role", "group");
    this.texts.setAttribute("aria-labelledby", `${id}-name`);
    this.variety = element("p", "variety hint");
    this.element.append(
      name, element("p", "how", how), this.#scrubber(id), list, this.trouble, this.variety, this.texts,
    );
    this.views = [];
    for (let i = 0; i < this.samples; i++) this.#addSample(i);
  }

  #addSample(i) {
    const view = new SampleView(this.choice.model.proteins);
    if (this.infill) view.element.classList.add("infill");
    const box = element("div", "sample");
    if (this.samples > 1) box.append(element("h4", "", `Sample ${i + 1}`));
    const again = element("button", "quiet", "Rewrite part of this");
    again.type = "button";
    again.hidden = true;
    // The click itself may clear the selection, so it is read when the button is pressed.
    let selected = null;
    again.addEventListener("pointerdown", () => { selected = view.selection(); });
    again.addEventListener("click", () => {
      this.rewrite(view.text(), selected ?? view.selection());
      selected = null;
    });
    box.append(view.element, again);
    this.texts.append(box);
    this.views.push(view);
    (this.again ??= []).push(again);
  }

  #scrubber(id) {
    const row = element("div", "scrub");
    const label = element("label", "", "Step");
    this.range = element("input");
    Object.assign(this.range, { type: "range", min: 0, max: 0, value: 0, id: `${id}-step`, disabled: true });
    label.htmlFor = this.range.id;
    this.stepShown = element("span");
    this.stepShown.setAttribute("aria-hidden", "true");
    this.range.addEventListener("input", () => {
      this.show(Number(this.range.value));
      this.moved();
    });
    row.append(label, this.range, this.stepShown);
    return row;
  }

  /** Keep a canvas of the server and show it, unless the reader looks at an earlier step. */
  take(event) {
    const rows = (this.frames.at(-1)?.rows ?? []).slice();
    for (const choice of event.choices) rows[choice.index] = choice.tokens.map((piece) => this.#one(piece));
    this.frames.push({ step: event.step, steps: event.steps, passes: event.passes, seconds: event.seconds, rows });
    this.state = "writing";
    // The slider is as long as the lane will be, so that it shows how far it is.
    this.range.max = Math.max(event.steps, this.frames.length - 1);
    this.range.disabled = this.frames.length < 2;
    this.#schedule();
  }

  // The same string for the same piece: hundreds of canvases hold few different ones.
  #one(piece) {
    if (!this.pieces.has(piece)) this.pieces.set(piece, piece);
    return this.pieces.get(piece);
  }

  #schedule() {
    this.waiting ??= requestAnimationFrame(() => {
      this.waiting = null;
      this.#draw();
    });
  }

  /** Show a frame by its number; the last one, or null, follows what comes. */
  show(position) {
    const last = this.frames.length - 1;
    this.position = position === null || position >= last ? null : Math.max(0, position);
    this.#draw();
  }

  /** Show what stood there after so many seconds. */
  showAt(seconds) {
    const later = this.frames.findIndex((frame) => frame.seconds > seconds);
    this.show(later < 0 ? null : later - 1);
  }

  /** Seconds that the lane took until its last frame. */
  get seconds() {
    return this.frames.at(-1)?.seconds ?? 0;
  }

  #draw() {
    const last = this.frames.length - 1;
    if (last < 0) return;
    const at = this.position ?? last;
    const frame = this.frames[at];
    const over = this.state !== "writing";
    this.views.forEach((view, i) => {
      if (!frame.rows[i]) return;
      if (!view.row.length) view.draw(this.frames[0].rows[i], null, null);
      const finished = over ? this.frames[last].rows[i] : null;
      view.draw(frame.rows[i], at > 0 ? this.frames[at - 1].rows[i] : null, finished);
    });
    // Steps that write nothing are skipped, the last ones too.
    const step = at === last && this.state === "done" ? frame.steps : frame.step;
    this.range.value = at;
    this.range.setAttribute("aria-valuetext", `step ${step} of ${frame.steps}, ${inPasses(frame.passes)} passes`);
    this.stepShown.textContent = `${step} of ${frame.steps}`;
    this.numbers.passes.textContent = inPasses(frame.passes);
    this.numbers.seconds.textContent = inSeconds(frame.seconds).replace(" s", "");
  }

  /** Take the final completion: numbers of the whole text. */
  finish(completion) {
    this.completion = completion;
    this.#end("done");
    const { usage = {}, didi = {} } = completion;
    const seconds = didi.seconds ?? this.seconds;
    this.numbers.passes.textContent = inPasses(didi.passes ?? this.frames.at(-1)?.passes ?? 0);
    this.numbers.seconds.textContent = inSeconds(seconds).replace(" s", "");
    if (usage.completion_tokens && seconds > 0) {
      this.numbers.rate.textContent = Math.round(usage.completion_tokens / seconds).toLocaleString("en");
    }
    const perplexities = [didi.perplexity].flat().filter((value) => Number.isFinite(value));
    if (perplexities.length) this.numbers.perplexity.textContent = together(perplexities).toFixed(1);
    if (this.samples > 1) {
      const { shared, only } = markVariety(this.views);
      this.variety.textContent =
        `${percent(only)} of the words are in one sample only; ${percent(shared)} stand in phrases that samples share.`;
      this.#draw();
    }
    this.again.forEach((button) => { button.hidden = false; });
  }

  /** Keep what is there: the reader stopped. */
  stop() {
    if (this.state !== "waiting" && this.state !== "writing") return;
    this.#end("stopped");
    const last = this.frames.at(-1);
    this.#say(last ? `Stopped at step ${last.step} of ${last.steps}.` : "Stopped before it began.");
  }

  /** Say in the lane what went wrong. */
  fail(message) {
    this.#end("failed");
    this.#say(message);
  }

  /** Say in the lane why its model does not take part. */
  sitOut(reason) {
    this.#end("out");
    this.#say(reason);
  }

  #say(message) {
    this.trouble.textContent = message;
    this.trouble.hidden = false;
  }

  #end(state) {
    this.state = state;
    this.range.max = Math.max(0, this.frames.length - 1);
    this.element.dataset.state = state;
    this.element.classList.toggle("empty", !this.frames.length);
    if (this.waiting) cancelAnimationFrame(this.waiting);
    this.waiting = null;
    this.#draw();
  }
}
