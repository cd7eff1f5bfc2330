// The page: runs the race, keeps the link, tells what happens.

import { Trouble, countTokens, diffuse, listModels, useKey } from "./api.js";
import { residueClasses } from "./canvas.js";
import { examplesFor } from "./examples.js";
import { Lane, inSeconds } from "./lane.js";
import { cut, judgeOf, possibleLanes, refusal, requestOf } from "./plan.js";
import { Replay } from "./replay.js";
import { Form, fromHash, toHash } from "./settings.js";

const by = (id) => document.getElementById(id);
const form = new Form(by("wish"));
const replay = new Replay(by, () => keepLink());

let models = [];
let choices = [];
let lanes = [];
let written = null; // settings of the texts on the page
let running = null; // AbortController of the race
let link = ""; // the hash this page has set itself

/** Say in one line, also to a screen reader, where things stand. */
function say(message) {
  by("status").textContent = message;
}

/** Show what is wrong with the page as a whole; nothing hides it. */
function complain(message) {
  by("trouble").textContent = message;
  by("trouble").hidden = !message;
}

/** Put the settings of what is seen, and the steps looked at, into the address. */
function keepLink() {
  link = toHash(written ?? form.read(), written ? lanes.map((lane) => lane.position) : []);
  history.replaceState(null, "", link);
}

function showLegend(settings, judge) {
  const entries = [["blank mask", "", "not yet written"], ["fresh", "abc", "written in this step"]];
  if (settings.mode === "infill" || settings.prompt) entries.push(["given", "abc", "given"]);
  if (settings.samples > 1) {
    entries.push(["shared", "words", "in a phrase samples share"], ["only", "word", "in one sample only"]);
  }
  if (lanes.some((lane) => lane.choice.model.proteins)) {
    const names = { oily: "hydrophobic", ring: "aromatic" };
    for (const [name, letters] of residueClasses) {
      entries.push([`${name} residue`, letters, names[name] ?? name]);
    }
  }
  const items = entries.map(([kind, sample, meaning]) => {
    const item = document.createElement("li");
    const mark = document.createElement("span");
    mark.className = `t ${kind}`;
    mark.textContent = sample;
    item.append(mark, ` ${meaning}`);
    return item;
  });
  if (judge !== null) {
    items.push(document.createElement("li"));
    items.at(-1).textContent = `Perplexity: under ${judge}`;
  }
  by("legend").classList.toggle("protein", lanes.some((lane) => lane.choice.model.proteins));
  by("legend").replaceChildren(...items);
}

function busy(on) {
  by("run").setAttribute("aria-disabled", String(on));
  by("stop").setAttribute("aria-disabled", String(!on));
  const focused = document.activeElement === by("stop-here");
  by("stop-here").hidden = !on;
  if (focused && !on) by("race").focus(); // a hidden button would lose it
}

/** On a small screen the texts begin below its end: bring them up. */
function bringUp() {
  const { bottom } = by("race-title").getBoundingClientRect();
  if (bottom > innerHeight * 0.8) by("race").scrollIntoView({ block: "start" });
}

/** The length of the gap as the server reads it, to one model. */
async function gapFor(model, settings, signal) {
  const { replaced } = cut(settings);
  if (settings.mode !== "infill" || settings.gap !== "same" || replaced === null) return "auto";
  return String(Math.max(1, await countTokens(model, replaced, signal)));
}

/** Show in a lane what the server tells of its text. */
async function follow(lane, { path, body }, signal) {
  for await (const event of diffuse(path, body, signal)) {
    if (event.object === "text_completion.canvas") lane.take(event);
    else lane.finish(event);
  }
}

/** Let one lane write, to its end or its trouble. */
async function write(lane, settings, judge, signal) {
  const reason = refusal(lane.choice, settings);
  if (reason !== null) return lane.sitOut(reason);
  try {
    const gap = await gapFor(lane.choice.model.id, settings, signal);
    try {
      await follow(lane, requestOf(lane.choice, settings, judge, gap), signal);
    } catch (error) {
      // A judge reads the texts of models with its own tokens alone: without it, no perplexity.
      if (error.param !== "judge") throw error;
      await follow(lane, requestOf(lane.choice, settings, null, gap), signal);
    }
    if (lane.state !== "done") lane.fail("The server ended without a text. Press Write to try again.");
    else say(`${lane.choice.title}: done after ${inSeconds(lane.completion.didi?.seconds ?? lane.seconds)}.`);
  } catch (error) {
    if (signal.aborted || error.name === "AbortError") return lane.stop();
    if (!(error instanceof Trouble)) throw error;
    if (error.status === 401) askForKey();
    lane.fail(error.message);
  }
  return undefined;
}

/** Run the race that the settings describe; resolves when all lanes are at their end. */
async function race(settings) {
  running?.abort();
  complain("");
  const chosen = choices.filter((choice) => settings.lanes.includes(choice.key));
  if (!chosen.length) return complain("Nobody is chosen to write: tick a model under “Who writes”.");
  if (settings.mode === "infill" && settings.to <= settings.from && !/_{3,}/.test(settings.text)) {
    complain("No words are selected: select in the text what is to be rewritten.");
    return by("text").focus();
  }
  const own = new AbortController();
  running = own;
  written = settings;
  lanes = chosen.map((choice, i) => new Lane(choice, settings, i, { rewrite, moved: keepLink }));
  by("lanes").replaceChildren(...lanes.map((lane) => lane.element));
  const judge = judgeOf(models);
  showLegend(settings, judge);
  replay.offer([]);
  keepLink();
  busy(true);
  bringUp();
  say(`${lanes.length === 1 ? "One lane writes" : `${lanes.length} lanes write`}.`);
  if (settings.turns === "apart") {
    for (const lane of lanes) await write(lane, settings, judge, own.signal);
  } else {
    await Promise.all(lanes.map((lane) => write(lane, settings, judge, own.signal)));
  }
  if (running !== own) return undefined; // another race has begun
  running = null;
  busy(false);
  replay.offer(lanes);
  const failed = lanes.filter((lane) => lane.state === "failed");
  const names = failed.map((lane) => lane.choice.title).join(", ");
  const rest = failed.length ? ` Without a text: ${names}; the lane says why.` : "";
  say(own.signal.aborted ? "Stopped." : `All done.${rest}`);
  return undefined;
}

/** Take a sample, or the words selected in it, as the text to rewrite. */
function rewrite(text, selection) {
  form.write({ mode: "infill" });
  form.setText(text, selection);
  const area = by("text");
  area.scrollIntoView({ block: "center" });
  area.focus();
  area.setSelectionRange(selection?.from ?? 0, selection?.to ?? 0);
}

function askForKey() {
  by("key-form").hidden = false;
}

/** Show the settings of a link and what was seen with them. */
async function followLink(settings) {
  const missing = form.write(settings);
  await race(form.read());
  if (missing.length) complain(`The link names what this server does not serve: ${missing.join(", ")}.`);
  lanes.forEach((lane, i) => {
    const step = settings.at[i] ?? null;
    if (step !== null && lane.frames.length) lane.show(step);
  });
  keepLink();
}

async function copyLink() {
  if (!written) written = form.read();
  keepLink();
  try {
    await navigator.clipboard.writeText(location.href);
    say("The link is on the clipboard. It holds the seed and all settings.");
  } catch {
    // Browsers give pages without HTTPS no clipboard.
    by("link-shown").hidden = false;
    by("link").value = location.href;
    by("link").focus();
    by("link").select();
  }
}

function offerExamples() {
  const { prompts, text, selection } = examplesFor(models);
  by("prompt").value = prompts[0];
  form.setText(text, selection);
  by("examples").replaceChildren(...prompts.map((prompt) => {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "quiet";
    button.textContent = prompt || "nothing";
    button.addEventListener("click", () => { by("prompt").value = prompt; });
    return button;
  }));
}

/** Ask who is served, then follow the link the page was opened with. */
async function open() {
  try {
    models = await listModels();
  } catch (error) {
    if (!(error instanceof Trouble)) throw error;
    if (error.status === 401) askForKey();
    complain(error.message);
    say("The list of models did not come.");
    return;
  }
  by("key-form").hidden = true;
  complain("");
  choices = possibleLanes(models);
  form.offer(choices);
  offerExamples();
  form.showMode();
  say("Ready.");
  const linked = fromHash(location.hash);
  if (linked) await followLink(linked);
}

by("wish").addEventListener("submit", (event) => {
  event.preventDefault();
  if (!running && choices.length) race(form.read());
});
by("wish").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) by("wish").requestSubmit();
});
for (const id of ["stop", "stop-here"]) by(id).addEventListener("click", () => running?.abort());
by("share").addEventListener("click", copyLink);
by("reseed").addEventListener("click", () => { by("seed").value = Math.floor(Math.random() * 2 ** 31); });
by("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey(by("key").value);
  open();
});
by("skip").addEventListener("click", (event) => {
  event.preventDefault();
  by("race").focus();
});
window.addEventListener("hashchange", () => {
  const linked = location.hash === link ? null : fromHash(location.hash);
  if (linked && choices.length) followLink(linked);
});
open();
