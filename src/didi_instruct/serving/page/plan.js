// Who writes: lanes from the served models, and the request of each.

const many = (model, models) =>
  model.role === "teacher" || models.filter((other) => other.kind !== "ar").length === 1;

/** All lanes that the served models allow, in the order they are shown. */
export function possibleLanes(models) {
  const lanes = [];
  for (const model of models) {
    if (model.kind === "ar") {
      lanes.push({ key: `${model.id}@tokens`, model, pace: "tokens", title: "Left to right" });
      continue;
    }
    const title = { student: "Student", teacher: "Teacher" }[model.role] ?? model.id;
    const both = many(model, models);
    const few = model.role === "teacher" ? `${title}, as few steps` : both ? `${title}, few steps` : title;
    lanes.push({ key: `${model.id}@few`, model, pace: "few", title: few });
    if (both) lanes.push({ key: `${model.id}@many`, model, pace: "many", title: `${title}, many steps` });
  }
  return lanes;
}

/** The model that measures perplexity: the teacher, else a left-to-right model, else none. */
export function judgeOf(models) {
  const judge = models.find((m) => m.role === "teacher") ?? models.find((m) => m.kind === "ar");
  return judge?.id ?? null;
}

const TOKEN_BY_TOKEN = "first-hitting"; // the sampler of masked models that takes as many steps as tokens

/** The sampler to ask for, or null for the model's own. */
function samplerOf(lane, settings) {
  return lane.model.samplers.includes(settings.sampler) ? settings.sampler : null;
}

/** Steps of a lane; null where the text's length says them. */
export function stepsOf(lane, settings) {
  if (samplerOf(lane, settings) === TOKEN_BY_TOKEN) return null;
  return { few: settings.steps, many: settings.many, tokens: null }[lane.pace];
}

/** One line under a lane's name. */
export function describe(lane, settings) {
  const steps = stepsOf(lane, settings);
  const pace = steps === null ? "one pass a token" : `${steps} step${steps === 1 ? "" : "s"}`;
  return `${lane.model.id} · ${pace}`;
}

/** The reason why a lane cannot do what is asked, or null. */
export function refusal(lane, settings) {
  if (settings.mode !== "infill") return null;
  if (lane.model.kind === "ar") {
    return "A left-to-right model sees only what comes before, so it cannot rewrite the middle of a text.";
  }
  const chosen = settings.gap === "auto" || settings.to <= settings.from;
  if (lane.model.kind === "duo" && chosen) {
    return "A uniform-state model cannot choose how long the new part is: select words, and let it be as many " +
      "tokens as now.";
  }
  return null;
}

/** The text with its gap as `/v1/infill` reads it, and what stood there (null: marked by hand). */
export function cut(settings) {
  const { text, from, to } = settings;
  if (to <= from) return { text, replaced: null };
  // Spaces before a gap belong to what is written there, so they are counted with it.
  const before = text.slice(0, from);
  const spaces = before.match(/ *$/)[0];
  return { text: `${before}___${text.slice(to)}`, replaced: spaces + text.slice(from, to) };
}

/** Path and body of a lane's request. `gap` is what `/v1/infill` calls so. */
export function requestOf(lane, settings, judge, gap) {
  const { model } = lane;
  const body = {
    model: model.id, n: settings.samples, seed: settings.seed, temperature: settings.temperature,
    top_p: settings.top_p, stream: true, diffusing: true,
  };
  const steps = stepsOf(lane, settings);
  if (steps !== null) body.steps = steps;
  const sampler = samplerOf(lane, settings);
  if (sampler !== null) body.sampler = sampler;
  if (judge !== null) body.judge = judge;
  if (settings.mode === "infill") {
    return { path: "v1/infill", body: { ...body, text: cut(settings).text, gap } };
  }
  if (settings.length < model.length) body.max_tokens = settings.length;
  return { path: "v1/completions", body: { ...body, prompt: settings.prompt } };
}
