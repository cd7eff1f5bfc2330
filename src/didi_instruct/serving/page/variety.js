// Which words several samples share, and which only one of them has.

const WORD = /[\p{L}\p{N}]+(?:['’][\p{L}\p{N}]+)*/gu;
export const RUN = 3; // words in a row that make a shared phrase

/** Words of a text: lower case, and where each begins and ends. */
export function wordsOf(text) {
  return [...text.matchAll(WORD)].map((match) => ({
    word: match[0].toLowerCase(), from: match.index, to: match.index + match[0].length,
  }));
}

/** Phrases of RUN words, as strings. */
function phrasesOf(words) {
  const phrases = new Set();
  for (let i = 0; i + RUN <= words.length; i++) phrases.add(phraseAt(words, i));
  return phrases;
}

const phraseAt = (words, i) => words.slice(i, i + RUN).map((w) => w.word).join(" ");

/**
 * Compare texts. Each word becomes "shared" (it stands in RUN words in a row that another text has
 * too), "only" (no other text has the word) or "plain". Returns the words of each text and the
 * shares of both kinds among all words.
 */
export function compare(texts) {
  const all = texts.map(wordsOf);
  const vocabularies = all.map((words) => new Set(words.map((w) => w.word)));
  const phrases = all.map(phrasesOf);
  let total = 0, shared = 0, only = 0;
  all.forEach((words, text) => {
    const others = [...all.keys()].filter((other) => other !== text);
    const kinds = words.map((w) => (others.some((o) => vocabularies[o].has(w.word)) ? "plain" : "only"));
    for (let i = 0; i + RUN <= words.length; i++) {
      const phrase = phraseAt(words, i);
      if (others.some((o) => phrases[o].has(phrase))) kinds.fill("shared", i, i + RUN);
    }
    words.forEach((w, i) => { w.kind = kinds[i]; });
    total += words.length;
    shared += kinds.filter((kind) => kind === "shared").length;
    only += kinds.filter((kind) => kind === "only").length;
  });
  return { words: all, shared: total ? shared / total : 0, only: total ? only / total : 0 };
}
