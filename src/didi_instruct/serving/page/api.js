// Requests to the server, its events, and its errors in plain words.

/** What went wrong, in words for the reader, and what to do about it. */
export class Trouble extends Error {
  constructor(message, { status = 0, param = null } = {}) {
    super(message);
    this.status = status;
    this.param = param;
  }
}

let key = sessionStorage.getItem("didi-key") ?? "";

/** Send this key with every request, until the tab is closed. */
export function useKey(value) {
  key = value;
  sessionStorage.setItem("didi-key", value);
}

const SETTINGS = {
  max_tokens: "Longest text", n: "Samples", steps: "Steps", temperature: "Temperature", top_p: "Top p",
  seed: "Seed", sampler: "Sampler", gap: "How long the new part is", text: "The text", prompt: "How it begins",
};

/** A message as a sentence, short enough for a lane. */
function sentence(message) {
  const short = message.length > 240 ? `${message.slice(0, 230)} …` : message;
  return /[.!?…]$/.test(short) ? short : `${short}.`;
}

/** Say what an answer that is no success means. */
async function troubleOf(response) {
  let said = {};
  try {
    said = (await response.json()).error ?? {};
  } catch {
    // A proxy's answer, say, which is not JSON: the status has to do.
  }
  const status = response.status;
  const detail = sentence(said.message ?? `Status ${status}`);
  const named = SETTINGS[said.param] ?? said.param;
  if (status === 429) {
    const seconds = Number(response.headers.get("Retry-After")) || null;
    const when = seconds ? `in ${seconds} second${seconds === 1 ? "" : "s"}` : "in a moment";
    return new Trouble(`The server is busy: its queue is full. Press Write again ${when}.`,
      { status });
  }
  if (status === 401) return new Trouble("The server wants its key. Type it above.", { status });
  if (status === 413) return new Trouble(`That is too much text for this server. Shorten it. (${detail})`, { status });
  if (status === 503) {
    return new Trouble(`The server cannot write this now: ${detail} Try again in a moment.`, { status });
  }
  if (status >= 500) return new Trouble(`The server failed. Try again; its log says more. (${detail})`, { status });
  const where = named ? `${named}: ` : "";
  return new Trouble(`The server refused this. ${where}${detail} Change it and press Write.`, { status, param: said.param });
}

/** Call a path of the server; anything but success is Trouble. */
async function call(path, options = {}) {
  const headers = { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  let response;
  try {
    response = await fetch(new URL(path, document.baseURI), { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Trouble("The server does not answer. See that didi serve still runs and that you are connected, then try again.");
  }
  if (!response.ok) throw await troubleOf(response);
  return response;
}

/** The served models, SOURCE first. */
export async function listModels() {
  return (await (await call("v1/models")).json()).data;
}

/** Number of tokens of a text, to a model. */
export async function countTokens(model, text, signal) {
  const body = JSON.stringify({ model, text });
  const answer = await (await call("tokenize", { method: "POST", body, signal })).json();
  return answer.tokens.length;
}

/** Split a stream of server-sent events into their data. */
async function* eventData(stream) {
  const reader = stream.getReader();
  const decoder = new TextDecoder();
  let pending = "";
  while (true) {
    const { value, done } = await reader.read();
    if (done) return;
    // A CR at the end may be half of a CR LF: it waits for the next piece.
    pending = (pending + decoder.decode(value, { stream: true })).replace(/\r\n/g, "\n");
    const blocks = pending.split("\n\n");
    pending = blocks.pop();
    for (const block of blocks) {
      const lines = block.split("\n").filter((line) => line.startsWith("data:"));
      if (lines.length) yield lines.map((line) => line.slice(5).trimStart()).join("\n");
    }
  }
}

/**
 * Ask for a text and yield what the server tells of it: canvases, then the completion.
 * Ends after `[DONE]`; a stream that breaks off before that is Trouble.
 */
export async function* diffuse(path, body, signal) {
  const response = await call(path, { method: "POST", body: JSON.stringify(body), signal });
  try {
    for await (const data of eventData(response.body)) {
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Trouble(`The server gave up on this text: ${sentence(event.error.message)} Try again.`);
      yield event;
    }
  } catch (error) {
    if (error instanceof Trouble || error.name === "AbortError") throw error;
  }
  throw new Trouble("The connection broke off. What was written until then is kept; press Write to start again.");
}
