// Settings of the page: the controls that show them and the link that carries them.

const TEXTS = ["mode", "prompt", "text", "gap", "sampler", "turns"];
const NUMBERS = ["from", "to", "steps", "many", "temperature", "samples", "length", "top_p", "seed"];
const RANGES = ["steps", "many", "temperature", "samples", "length", "top_p"];
const MODES = ["prompt", "infill"];
const NOTHING =
  "Nothing is selected. Select words above, by pointer or with Shift and the arrow keys; " +
  "or type ___ where words are to be found.";

/** The part of a link behind `#`: all that decides what is seen. `at`: steps looked at, by lane. */
export function toHash(settings, at = []) {
  const unused = settings.mode === "prompt" ? ["text", "from", "to", "gap"] : ["prompt", "length"];
  const pairs = [...TEXTS, ...NUMBERS].filter((name) => !unused.includes(name));
  const query = new URLSearchParams(pairs.map((name) => [name, String(settings[name])]));
  query.set("lanes", JSON.stringify(settings.lanes));
  if (at.some((step) => step !== null)) query.set("at", at.map((step) => step ?? "").join(","));
  return `#${query}`;
}

/** Settings that a link carries, without those it does not name or names wrongly; null: it carries none. */
export function fromHash(hash) {
  const query = new URLSearchParams(hash.slice(1));
  if (!MODES.includes(query.get("mode"))) return null;
  const settings = {};
  for (const name of TEXTS) if (query.has(name)) settings[name] = query.get(name);
  for (const name of NUMBERS) {
    const value = Number(query.get(name) ?? NaN);
    if (Number.isFinite(value) && value >= 0) settings[name] = value;
  }
  try {
    const lanes = JSON.parse(query.get("lanes"));
    if (Array.isArray(lanes)) settings.lanes = lanes.map(String);
  } catch {
    // A damaged list of lanes: those chosen on the page stay.
  }
  settings.at = (query.get("at") ?? "").split(",").map((step) => (/^\d+$/.test(step) ? Number(step) : null));
  return settings;
}

/** The form: reads and writes all settings, shows the values of sliders and what is selected. */
export class Form {
  constructor(form) {
    this.form = form;
    this.by = (id) => form.querySelector(`#${id}`);
    this.span = { from: 0, to: 0 };
    for (const name of RANGES) this.by(name).addEventListener("input", () => this.showValues());
    form.querySelectorAll("[name=mode]").forEach((box) => box.addEventListener("change", () => this.showMode()));
    const text = this.by("text");
    for (const kind of ["select", "keyup", "pointerup", "input"]) text.addEventListener(kind, () => this.#chosen());
    // A textarea's `select` is not sent by all browsers when its selection collapses.
    document.addEventListener("selectionchange", () => {
      if (document.activeElement === text) this.#chosen();
    });
  }

  #chosen() {
    const text = this.by("text");
    this.span = { from: text.selectionStart, to: text.selectionEnd };
    this.showSelection();
  }

  /** Give the text to rewrite and its selection. */
  setText(value, selection) {
    this.by("text").value = value;
    this.span = selection ?? { from: 0, to: 0 };
    this.showSelection();
  }

  /** Say which words are selected. */
  showSelection() {
    const { from, to } = this.span;
    const chosen = this.by("text").value.slice(from, to);
    const gaps = /_{3,}/.test(this.by("text").value);
    const said = this.by("selected");
    said.replaceChildren();
    if (chosen) {
      const mark = document.createElement("mark");
      mark.textContent = chosen.length > 160 ? `${chosen.slice(0, 150)} …` : chosen;
      said.append("Will be rewritten: ", mark);
    } else {
      said.append(gaps ? "The gaps marked ___ will be filled." : NOTHING);
    }
  }

  /** Show the values of all sliders beside them. */
  showValues() {
    for (const name of RANGES) {
      const input = this.by(name);
      const shown = name === "temperature" || name === "top_p" ? Number(input.value).toFixed(2) : input.value;
      const text = name === "length" ? `${shown} tokens` : shown;
      this.by(`${name}-shown`).textContent = text;
      input.setAttribute("aria-valuetext", text);
    }
  }

  /** Show the controls of the chosen task alone. */
  showMode() {
    const { mode } = this.read();
    this.by("prompt-pane").hidden = mode !== "prompt";
    this.by("infill-pane").hidden = mode !== "infill";
    this.by("length").disabled = mode === "infill";
  }

  /** Offer what the served models allow. */
  offer(lanes) {
    const models = lanes.map((lane) => lane.model);
    const longest = Math.max(...models.map((model) => model.length));
    for (const name of ["many", "length"]) this.by(name).max = longest;
    this.by("steps").max = Math.min(64, longest);
    this.by("many").value = Math.min(longest, 128);
    this.by("length").value = longest;
    const samplers = new Set(models.filter((model) => model.kind !== "ar").flatMap((model) => model.samplers));
    const select = this.by("sampler");
    for (const name of samplers) select.add(new Option(name, name));
    const boxes = this.by("lane-boxes");
    boxes.replaceChildren(...lanes.map((lane) => {
      const label = document.createElement("label");
      const box = document.createElement("input");
      Object.assign(box, { type: "checkbox", name: "lane", value: lane.key, checked: true });
      label.append(box, ` ${lane.title}`);
      label.title = lane.model.id;
      return label;
    }));
    this.showValues();
  }

  /** All settings as they stand. */
  read() {
    const value = (id) => this.by(id).value;
    const lanes = [...this.form.querySelectorAll("[name=lane]:checked")].map((box) => box.value);
    const settings = { mode: this.form.elements.mode.value, ...this.span, lanes };
    for (const name of TEXTS.slice(1)) settings[name] = value(name);
    for (const name of [...RANGES, "seed"]) settings[name] = Number(value(name));
    return settings;
  }

  /** Put settings into the controls; those not named stay. Returns names of lanes that are not served. */
  write(settings) {
    for (const name of [...TEXTS.slice(1), ...RANGES, "seed"]) {
      if (settings[name] !== undefined) this.by(name).value = settings[name];
    }
    if (settings.mode) this.form.elements.mode.value = settings.mode;
    if (settings.to !== undefined) this.span = { from: settings.from ?? 0, to: settings.to };
    let missing = [];
    if (settings.lanes) {
      const boxes = [...this.form.querySelectorAll("[name=lane]")];
      for (const box of boxes) box.checked = settings.lanes.includes(box.value);
      missing = settings.lanes.filter((key) => !boxes.some((box) => box.value === key));
    }
    if (this.by("sampler").value === "") this.by("sampler").value = ""; // a sampler no longer served
    this.showValues();
    this.showMode();
    this.showSelection();
    return missing;
  }
}
